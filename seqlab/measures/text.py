"""How well a model knows a text it was not trained on, and what the order of words adds."""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from seqlab.measures.base import Predictor
from seqlab.tasks.text import Text
from seqlab.types import Curve, PRNGKey


@dataclass(frozen=True)
class BitsPerByte:
    """The cross-entropy of the whole test split, every character scored once by `Text.window`.

    `bits_per_character` is the mean over the scored characters; `bits_per_byte` divides the same bits by the bytes of
    these characters in UTF-8, so that texts of different alphabets compare. `bits_per_byte_shuffled_words` scores the
    same targets in shuffled context: for `next`, the words older than half a window; for `masked`, all words of the
    window. A masked predictor without any sense of order has exactly the plain value.
    """

    task_type: ClassVar[type] = Text
    batch_size: int = 64
    """Windows at a time; the result does not depend on it."""

    def __call__(self, model: Predictor, task: Text, key: PRNGKey) -> dict[str, Curve]:
        task_bytes = task.utf8_bytes

        def score(first: Int[Array, ""], shuffled: Bool[Array, ""]):
            batch = task.window("test", first + jnp.arange(self.batch_size), key, shuffled)
            loss, _ = task.loss(model.predict(batch.inputs, batch.scored, batch.segments), batch)
            scored = batch.weights.astype(jnp.int32)
            bits = loss * batch.weights.sum() / math.log(2)
            return bits, scored.sum(), (scored * task_bytes[batch.targets]).sum()

        # Plain and shuffled windows pass through one loop, so that the model is compiled once.
        firsts = jnp.arange(0, task.windows("test"), self.batch_size)
        runs = jnp.tile(firsts, 2), jnp.repeat(jnp.array([False, True]), firsts.size)
        bits, characters, utf8_bytes = jax.lax.map(lambda run: score(*run), runs)
        plain, shuffled = bits.reshape(2, -1).sum(axis=1)
        characters, utf8_bytes = (count[: firsts.size].sum().astype(jnp.float32) for count in (characters, utf8_bytes))
        return {
            "bits_per_character": Curve(plain / characters),
            "bits_per_byte": Curve(plain / utf8_bytes),
            "bits_per_byte_shuffled_words": Curve(shuffled / utf8_bytes),
        }
