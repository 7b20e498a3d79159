"""Does a model know who did what to whom?"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from seqlab.measures.base import Predictor
from seqlab.tasks.roles import VOICES, Roles
from seqlab.types import Batch, Curve, PRNGKey


@dataclass(frozen=True)
class RoleAccuracy:
    """Answers on the test split, on noun pairs never trained on; `Roles.ceilings` says what readers without order get.

    accuracy                  the share of right answers
    both_correct              the share of sentence pairs, swapped in who does it to whom, answered right both times
    role_accuracy_by_voice    the share of right answers to active and to passive sentences
    """

    task_type: ClassVar[type] = Roles
    batches: int = 8
    batch_size: int = 128

    def __call__(self, model: Predictor, task: Roles, key: PRNGKey) -> dict[str, Curve]:
        def answer(key: PRNGKey):
            batch: Batch = task.sample(key, self.batch_size, "test")
            right = model.predict(batch.inputs, batch.scored).argmax(-1) == batch.targets
            return right.astype(jnp.float32).ravel(), batch.labels["voice"].ravel()

        right, voice = jax.lax.map(answer, jax.random.split(key, self.batches))
        of_voice = jax.nn.one_hot(voice, len(VOICES))
        by_voice = (right[..., None] * of_voice).sum((0, 1)) / of_voice.sum((0, 1))
        return {
            "accuracy": Curve(right.mean()),
            "both_correct": Curve(right.reshape(-1, 2).prod(-1).mean()),
            "role_accuracy_by_voice": Curve(by_voice, axes=(("voice", VOICES),)),
        }
