"""What is computed at each position alone, after the mixer: `mlp=`. Built as `mlp(width, rngs=rngs)`, ends in `out`."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear


class MLP(nnx.Module):
    """W_2 gelu(W_1 x): what is computed at each position alone."""

    def __init__(self, width: int, *, expansion: int | float = 4, rngs: nnx.Rngs):
        inner = hidden_width(width, expansion)
        self.up = Linear(width, inner, rngs=rngs)
        self.out = Linear(inner, width, rngs=rngs)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.out(jax.nn.gelu(self.up(x)))


class SwiGLU(nnx.Module):
    """W_3 (silu(W_1 x) * W_2 x) (Shazeer 2020, eq. 6)."""

    def __init__(self, width: int, *, expansion: int | float = 8 / 3, rngs: nnx.Rngs):
        inner = hidden_width(width, expansion)
        self.gate = Linear(width, inner, use_bias=False, rngs=rngs)
        self.up = Linear(width, inner, use_bias=False, rngs=rngs)
        self.out = Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.out(jax.nn.silu(self.gate(x)) * self.up(x))


def hidden_width(width: int, expansion: int | float) -> int:
    """Raises ValueError where nothing would be left."""
    inner = round(expansion * width)
    if inner < 1:
        raise ValueError(f"mlp.expansion={expansion} leaves an MLP without units; use 1 or more, or mlp=none")
    return inner
