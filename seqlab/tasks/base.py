"""What a task is, and the cross-entropy that tasks share."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqlab.types import Batch, PRNGKey, Split


@dataclass(frozen=True)
class Vocabulary:
    """Token ids and the words they stand for."""

    words: tuple[str, ...]
    separator: str = " "
    """What stands between words; nothing where they are characters."""

    @property
    def size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError where a word is unknown."""
        number = {word: i for i, word in enumerate(self.words)}
        words = text.split() if self.separator else list(text)
        for word in words:
            if word not in number:
                known = self.words if self.size <= 40 else (*self.words[:20], "...", *self.words[-3:])
                raise ValueError(f"{word!r} is not in the vocabulary: {self.separator.join(known)}")
        return [number[word] for word in words]

    def decode(self, ids) -> str:
        return self.separator.join(self.words[i] for i in ids)


@runtime_checkable
class Task(Protocol):
    """A pure, jittable source of examples, seeded by its key alone.

    A task is a frozen pytree (`flax.struct.dataclass`): what it holds on the device (a corpus) are leaves, everything
    else is static. Another length or load is another task: `task.replace(length=256)`.
    """

    vocab: Vocabulary
    length: int
    main_metric: str
    """The metric that a progress bar, an early stop and a comparison look at."""
    higher_is_better: bool

    def sample(self, key: PRNGKey, batch_size: int, split: Split) -> Batch:
        """Draws `batch_size` examples of a split; the same key gives the same examples."""
        ...

    def loss(self, logits: Float[Array, "B Q V"], batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """The loss to minimise (nats) and the metrics to show."""
        ...

    def ceilings(self) -> dict[str, float]:
        """What known strategies score on the main metric: chance, an order-blind reader, an oracle."""
        ...

    def asked_of(self, causal: bool) -> "Task":
        """The task as a causal or a bidirectional model must be asked it.

        Raises:
            ValueError: such a model would see its own answer.
        """
        ...


def cross_entropy(logits: Float[Array, "B Q V"], batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted mean cross-entropy in nats at the scored positions, and the accuracy there."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    nll = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
    total = jnp.maximum(batch.weights.sum(), 1e-9)
    loss = (nll * batch.weights).sum() / total
    correct = (logits.argmax(-1) == batch.targets).astype(jnp.float32)
    accuracy = (correct * batch.weights).sum() / total
    return loss, {"loss": loss, "accuracy": accuracy}
