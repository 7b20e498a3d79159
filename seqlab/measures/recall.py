"""Associative recall by gap, by load and by length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from seqlab.measures.base import Predictor
from seqlab.tasks.mqar import MQAR
from seqlab.types import Batch, Curve, PRNGKey


@dataclass(frozen=True)
class Recall:
    """Accuracy (not corrected for chance) on the test split of MQAR, over `batches` batches for each setting.

    accuracy            as trained
    recall_by_pairs     at `task.eval_pairs` (default: the powers of two that fit) and the load trained at, each with
                        the task's own law of slots
    recall_by_gap       distances asked uniformly, in bins [1, 2), [2, 4), [4, 8), ... named by their lower edge; NaN
                        where a run too small to fill a bin drew nothing
    recall_by_length    at `task.eval_lengths`, if there are any, distances asked uniformly: the law of slots trained
                        with may hardly ask beyond the length trained at
    """

    task_type: ClassVar[type] = MQAR
    batches: int = 8
    batch_size: int = 64

    def __call__(self, model: Predictor, task: MQAR, key: PRNGKey) -> dict[str, Curve]:
        loads = tuple(sorted({task.pairs, *(task.eval_pairs or powers_of_two(min(task.length // 4, task.key_count)))}))
        # what has its own loads and lengths is measured at neither again
        alone = replace(task, eval_pairs=(), eval_lengths=())
        settings = [*(replace(alone, pairs=pairs) for pairs in loads), replace(alone, slots="distance")]
        batch, right = self.answers(model, settings, key)
        by_load = weighted_mean(right, batch.weights, axis=(1, 2, 3))[: len(loads)]
        results = {
            "accuracy": Curve(by_load[loads.index(task.pairs)]),
            "recall_by_pairs": Curve(by_load, axes=(("pairs", loads),)),
        }

        edges = powers_of_two(task.length - 3)
        gap, asked = batch.labels["gap"][-1], batch.weights[-1]
        in_bin = jnp.stack([jnp.where((edge <= gap) & (gap < 2 * edge), asked, 0.0) for edge in edges])
        by_gap = weighted_mean(right[-1][None], in_bin, axis=(1, 2, 3))
        results["recall_by_gap"] = Curve(by_gap, axes=(("gap", edges),))

        if task.eval_lengths:
            by_length = []
            for length in task.eval_lengths:
                batch, right = self.answers(model, [replace(alone, length=length, slots="distance")], key)
                by_length.append(weighted_mean(right, batch.weights))
            results["recall_by_length"] = Curve(jnp.stack(by_length), axes=(("length", tuple(task.eval_lengths)),))
        return results

    def answers(
        self, model: Predictor, settings: Sequence[MQAR], key: PRNGKey
    ) -> tuple[Batch, Float[Array, "settings batches B Q"]]:
        """The batches of several settings of one length, and where the model is right (1) in them."""
        most = max(task.pairs for task in settings)

        def sample(task: MQAR, key: PRNGKey) -> Batch:
            batch = task.sample(key, self.batches * self.batch_size, "test")
            # padded with weight 0, so that one compiled model serves every load
            scored, targets, weights, labels = jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, most - task.pairs))),
                (batch.scored, batch.targets, batch.weights, batch.labels),
            )
            return replace(batch, scored=scored, targets=targets, weights=weights, labels=labels)

        def right(batch: Batch) -> Float[Array, "B Q"]:
            logits = model.predict(batch.inputs, batch.scored)
            return (logits.argmax(-1) == batch.targets).astype(jnp.float32)

        drawn = [sample(task, jax.random.fold_in(key, i)) for i, task in enumerate(settings)]
        rows = jax.tree.map(lambda *x: jnp.concatenate(x), *drawn)
        batches = jax.tree.map(lambda x: x.reshape(-1, self.batch_size, x.shape[1]), rows)
        answers = jax.lax.map(right, batches)
        return jax.tree.map(lambda x: x.reshape(len(settings), self.batches, *x.shape[1:]), (batches, answers))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the limit."""
    return tuple(2**i for i in range(limit.bit_length()))


def weighted_mean(x: Float[Array, "..."], weights: Float[Array, "..."], axis=None) -> Float[Array, "..."]:
    return (x * weights).sum(axis) / weights.sum(axis)
