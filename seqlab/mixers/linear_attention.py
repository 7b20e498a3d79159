"""Linear attention: a matrix of sums of keys times values in place of a cache of keys and values."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.matrix_memory import linear_attention
from seqlab.mixers.base import Recurrent, head_width
from seqlab.recurrence import Marks
from seqlab.types import State


def split(x: Float[Array, "T B HK"], heads: int) -> Float[Array, "T B H K"]:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def positive(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """elu(x) + 1 (Katharopoulos et al. 2020, eq. 7), without the rounding of exp(x) to a multiple of 2^-24."""
    return jnp.exp(jnp.minimum(x, 0.0)) + jnp.maximum(x, 0.0)


class LinearAttention(Recurrent):
    """Causal attention with weights phi(q) phi(k), phi = elu + 1, in place of exp(q k) (Katharopoulos et al. 2020,
    eqs. 8 to 12), for each head

        y_t = S_t^T phi(q_t) / (z_t^T phi(q_t)),  S_t = S_{t-1} + phi(k_t) v_t^T,  z_t = z_{t-1} + phi(k_t).

    The state is S with z as its last column, [B, H, K, K + 1].

    Raises:
        ValueError: the heads do not divide the width, `scan` is unknown, or `chunk` is below 1.
    """

    def __init__(self, width: int, *, heads: int, scan: str = "auto", chunk: int = 32, rngs: nnx.Rngs):
        self.heads, self.head_width = heads, head_width(width, heads)
        self.scan, self.chunk = scan, chunk
        self.query, self.key, self.value, self.out = (Linear(width, width, rngs=rngs) for _ in range(4))

    def init_state(self, batch: int, max_length: int) -> State:
        return jnp.zeros((batch, self.heads, self.head_width, self.head_width + 1), jnp.float32)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        q, k, v = (split(linear(x), self.heads).astype(jnp.float32) for linear in (self.query, self.key, self.value))
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        state, sums = linear_attention(
            state, positive(q), positive(k), v, None, marks, scan=self.scan, chunk=self.chunk
        )
        y = sums[..., :-1] / (sums[..., -1:] + 1e-6)  # as in the authors' code; phi may underflow
        return state, self.out(y.astype(x.dtype).reshape(x.shape))


class GLA(Recurrent):
    """Gated linear attention (Yang et al. 2024, sec. 4.4): each head forgets each channel of its keys at a rate of its
    own, that depends on the token,

        S_t = diag(a_t) S_{t-1} + k_t v_t^T,  a_t = s(W_2 W_1 x_t + b)^(1/16),
        y_t = silu(W_r x_t + b_r) norm(S_t^T q_t / sqrt(K))

    where W_1 has rows of length `rank` and the norm divides each head by its root mean square. The state is S,
    [B, H, K, D / H].

    Args:
        heads: H, each with D / H values.
        key_width: K, of each head; None: half as many as there are values.
        rank: of the product W_2 W_1.

    Raises:
        ValueError: the heads do not divide the width, a size or `chunk` is below 1, or `scan` is unknown.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        key_width: int | None = None,
        rank: int = 16,
        scan: str = "auto",
        chunk: int = 16,
        rngs: nnx.Rngs,
    ):
        self.heads, self.head_width = heads, head_width(width, heads)
        self.key_width = max(self.head_width // 2, 1) if key_width is None else key_width
        for name, value in (("key_width", self.key_width), ("rank", rank)):
            if value < 1:
                raise ValueError(f"model.{name}={value} must be at least 1")
        self.scan, self.chunk = scan, chunk
        keys = heads * self.key_width
        self.query, self.key = (Linear(width, keys, use_bias=False, rngs=rngs) for _ in range(2))
        self.value = Linear(width, width, use_bias=False, rngs=rngs)
        self.decay_down = Linear(width, rank, use_bias=False, rngs=rngs)
        self.decay_up = Linear(rank, keys, rngs=rngs)
        self.gate = Linear(width, width, rngs=rngs)
        self.norm = nnx.RMSNorm(self.head_width, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
        self.out = Linear(width, width, use_bias=False, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        return jnp.zeros((batch, self.heads, self.key_width, self.head_width), jnp.float32)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        q, k, v = (split(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        decay = split(self.decay_up(self.decay_down(x)), self.heads).astype(jnp.float32)
        log_decay = jax.nn.log_sigmoid(decay) / 16.0  # so that most of a state outlives some ten tokens
        state, o = linear_attention(state, q, k, v, log_decay, marks, scan=self.scan, chunk=self.chunk)
        y = self.norm(o * self.key_width**-0.5).astype(x.dtype).reshape(x.shape)
        return state, self.out(jax.nn.silu(self.gate(x)) * y)
