"""Checkpoints of a population through Orbax: the only place that knows its interface."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from seqlab.training.program import TrainState


class Checkpoints:
    """The checkpoints of one run; the newest few are kept."""

    def __init__(self, directory: Path, keep: int = 2):
        self._orbax = ocp.training.Checkpointer(
            str(directory.absolute()),
            # Orbax's policies are typed otherwise than its own parameters.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # pyright: ignore[reportArgumentType]
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]
        )

    def save(self, step: int, states: TrainState, train_seconds: float) -> None:
        """Writes in the background, from a copy that the next donated step cannot overwrite."""
        arrays = {name: np.array(leaf) for name, leaf in _named(states).items()}
        self._orbax.save_async(step, {**arrays, "train_seconds": np.float64(train_seconds)})

    def restore(self, like: TrainState) -> tuple[TrainState, float] | None:
        """The newest state, shaped `like` this one (which may be abstract), and the seconds trained until then; None
        where there is no checkpoint.

        Raises:
            ValueError: the checkpoint is of another shape.
        """
        if self._orbax.latest is None:
            return None
        expected = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in jax.eval_shape(_named, like).items()}
        loaded = self._orbax.load(self._orbax.latest, {**expected, "train_seconds": np.float64(0)})
        for name, wanted in expected.items():
            if loaded[name].shape != wanted.shape:
                shapes = f"{loaded[name].shape} in the checkpoint and {wanted.shape} in this run"
                raise ValueError(f"{self._orbax.directory}: {name} is {shapes}; use overwrite=true to start anew")
        leaves = [
            jax.random.wrap_key_data(jnp.asarray(loaded[name])) if _is_key(leaf) else jnp.asarray(loaded[name])
            for name, leaf in _leaves(like)
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), float(loaded["train_seconds"])

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        """Waits for what is being written."""
        self._orbax.close()


def _leaves(states: TrainState) -> list[tuple[str, Any]]:
    """Arrays, or their shapes where `states` is abstract."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(states)]


def _named(states: TrainState) -> dict[str, jax.Array]:
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in _leaves(states)}


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
