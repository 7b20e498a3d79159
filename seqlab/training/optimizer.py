"""The optimizer: AdamW with warm-up and cosine decay, whose weight decay leaves recurrences, norms and biases alone."""

from dataclasses import dataclass

import jax
import optax
from flax import nnx

from seqlab.mixers.base import Recurrence


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019) behind a clip of the gradient's global norm.

    `learning_rate` is the peak that members take unless `population.learning_rates` lists others; `warmup` and `floor`
    are fractions, of the steps and of the peak.
    """

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup: float = 0.05
    floor: float = 0.01

    def __post_init__(self):
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be at least 0 and below 1")
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} is a share; use 0 to 1")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be positive; 1e9 clips nothing")

    def transformation(self, steps: int) -> optax.GradientTransformation:
        """The update for a peak learning rate of 1: each member scales it by its own."""
        warmup_steps = max(1, round(self.warmup * steps))
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, warmup_steps, max(steps, warmup_steps + 1), end_value=self.floor
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(self.b1, self.b2),
            optax.add_decayed_weights(self.weight_decay, mask=decayed),
            optax.scale_by_learning_rate(schedule),
        )


def decayed(params: nnx.State) -> nnx.State:
    """True for the parameters that weight decay pulls to zero: matrices and embeddings, and nothing else."""

    def decays(path, param: nnx.Variable) -> nnx.Variable:
        axes = param.get_value().ndim - (path[0].key == "blocks")  # whose parameters are stacked
        spared = isinstance(param, Recurrence) or axes < 2 or path[-1].key == "bias"
        return jax.tree.map(lambda _: not spared, param)

    return jax.tree_util.tree_map_with_path(decays, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
