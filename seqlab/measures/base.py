"""What a measure is."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from seqlab.model import SequenceModel
from seqlab.tasks.base import Task
from seqlab.types import Curve, PRNGKey, Segments


@runtime_checkable
class Predictor(Protocol):
    """All that a measure of answers asks of a model: its logits at the scored positions."""

    def predict(
        self, tokens: Int[Array, "B T"], scored: Int[Array, "B Q"], segments: Segments = None
    ) -> Float[Array, "B Q V"]: ...


@runtime_checkable
class Measure(Protocol):
    """A pure, jittable look at one trained model on one task; the harness maps it over the population.

    Data are drawn from `key` alone, which is the same for every member and every architecture, so that comparisons
    are paired.
    """

    task_type: ClassVar[type]
    """The task whose batches it understands."""

    def __call__(self, model: SequenceModel, task: Task, key: PRNGKey) -> dict[str, Curve]: ...
