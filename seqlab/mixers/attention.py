"""Attention: content-based look-up of every earlier (or every) token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqlab.mixers.base import Mixer
from seqlab.positions import NoPosition, Position
from seqlab.types import Mask, State, Stream


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    allowed: Bool[Array, "#B #T S"],
) -> Float[Array, "B T H K"]:
    """softmax(q k / sqrt(K)) v over the allowed keys (Vaswani et al. 2017, eq. 1); zero for a query that may see none.

    The softmax is taken in float32. Forbidden scores are replaced, not lowered: no logit is large enough to leak.
    """
    scores = jnp.einsum("BTHK,BSHK->BHTS", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    allowed = jnp.broadcast_to(allowed[:, None], scores.shape)
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(allowed, jax.nn.softmax(scores), 0.0)
    return jnp.einsum("BHTS,BSHK->BTHK", weights.astype(v.dtype), v)


class Attention(Mixer):
    """Multi-head softmax attention: causal as in a transformer decoder, or over the whole sequence as in an encoder.

    Raises:
        ValueError: the width is not a multiple of the heads.
    """

    attends = True

    def __init__(
        self, width: int, *, heads: int, causal: bool = True, position: Position = NoPosition(), rngs: nnx.Rngs
    ):
        if heads < 1 or width % heads:
            fitting = [h for h in range(1, width + 1) if width % h == 0]
            raise ValueError(f"model.width={width} cannot be split into model.heads={heads}; heads that fit: {fitting}")
        self.heads, self.causal, self.position = heads, causal, position
        self.query, self.key, self.value, self.out = (nnx.Linear(width, width, rngs=rngs) for _ in range(4))

    @property
    def sees_order(self) -> bool:
        return self.causal or self.position.sees_order

    def project(self, x: Float[Array, "... D"], positions: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values [..., H, K], the first two turned to their positions."""
        q, k, v = (linear(x).reshape(*x.shape[:-1], self.heads, -1) for linear in (self.query, self.key, self.value))
        return self.position.rotate(q, positions), self.position.rotate(k, positions), v

    def __call__(self, x: Stream, mask: Mask = None) -> Stream:
        length = x.shape[1]
        allowed = jnp.ones((1, length, length), bool)
        if self.causal:
            allowed = jnp.tril(allowed)
        if mask is not None:
            allowed = allowed & mask[:, None, :]
        mixed = attend(*self.project(x, jnp.arange(length)), allowed)
        return self.out(mixed.reshape(x.shape))

    def init_state(self, batch: int, max_length: int) -> State:
        if not self.causal:
            raise NotImplementedError("bidirectional attention has no token-by-token form")
        width, dtype = self.key.kernel.shape[-1], self.key.kernel.dtype
        cache = jnp.zeros((batch, max_length, self.heads, width // self.heads), dtype)
        return {"keys": cache, "values": cache, "length": jnp.zeros(batch, jnp.int32)}

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        length = state["length"]
        q, k, v = self.project(x_t, length)
        rows = jnp.arange(len(length))
        keys = state["keys"].at[rows, length].set(k)
        values = state["values"].at[rows, length].set(v)
        allowed = jnp.arange(keys.shape[1])[None] <= length[:, None]
        mixed = attend(q[:, None], keys, values, allowed[:, None])
        return {"keys": keys, "values": values, "length": length + 1}, self.out(mixed.reshape(x_t.shape))
