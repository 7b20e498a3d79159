"""Delta networks: a matrix memory that replaces the value stored under a key where linear attention adds to it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.matrix_memory import delta_rule
from seqlab.mixers.base import Recurrence, Recurrent, head_width, negative
from seqlab.mixers.convolution import ShortConvolution
from seqlab.mixers.linear_attention import split
from seqlab.mixers.mamba import step_bias
from seqlab.recurrence import Marks
from seqlab.types import State

STREAMS = ("query", "key", "value")


def unit(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / |x|, where that is not much below .001."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


class DeltaNet(Recurrent):
    """The delta rule (Schlag et al. 2021) in the layer of Yang et al. (2024, sec. 3.3), for each head

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,  y_t = norm(S_t^T q_t / sqrt(K)),  beta_t = s(w x_t)

    where q, k and v are silu(conv(W x)), q and k then of length 1, and the norm divides each head by its root mean
    square. With `eigenvalue_range` [-1, 1] beta is 2 s(w x_t), so that I - beta k k^T may reflect (Grazzi et al. 2025).
    The state is S [B, H, K, K] and the last inputs of the three convolutions.

    Args:
        heads: H, of width K = D / H.
        convolution: how many tokens the convolutions see.

    Raises:
        ValueError: the heads do not divide the width, `eigenvalue_range` is neither [0, 1] nor [-1, 1], `scan` is
            unknown, or `convolution` or `chunk` is below 1.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        convolution: int = 4,
        eigenvalue_range: Sequence[int | float] = (0, 1),
        scan: str = "auto",
        chunk: int = 16,
        rngs: nnx.Rngs,
    ):
        self.heads, self.head_width = heads, head_width(width, heads)
        self.scan, self.chunk = scan, chunk
        self.largest_beta = 2.0 if negative(eigenvalue_range) else 1.0
        self.inputs, self.convolutions = nnx.data({}), nnx.data({})
        for name in STREAMS:
            self.inputs[name] = Linear(width, width, use_bias=False, rngs=rngs)
            self.convolutions[name] = ShortConvolution(width, size=convolution, use_bias=False, rngs=rngs)
        self.beta = Linear(width, heads, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(self.head_width, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
        self.out = Linear(width, width, use_bias=False, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        memory = jnp.zeros((batch, self.heads, self.head_width, self.head_width), jnp.float32)
        return {"memory": memory} | {name: self.convolutions[name].init_state(batch, max_length) for name in STREAMS}

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        after, streams = {}, {}
        for name in STREAMS:
            after[name], y = self.convolutions[name].run(state[name], self.inputs[name](x), marks)
            streams[name] = split(jax.nn.silu(y), self.heads).astype(jnp.float32)
        beta = self.largest_beta * jax.nn.sigmoid(self.beta(x).astype(jnp.float32))
        after["memory"], o = delta_rule(
            state["memory"],
            unit(streams["query"]) * self.head_width**-0.5,
            unit(streams["key"]),
            streams["value"],
            beta,
            self.log_decay(x),
            marks,
            scan=self.scan,
            chunk=self.chunk,
        )
        return after, self.out(self.gated(self.norm(o).astype(x.dtype).reshape(x.shape), x))

    def log_decay(self, x: Float[Array, "T B D"]) -> Float[Array, "T B H"] | None:
        """Of the state before the token; None: there is no decay."""
        return None

    def gated(self, y: Float[Array, "T B D"], x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        """What is put out of what was read."""
        return y


class GatedDeltaNet(DeltaNet):
    """A DeltaNet whose heads also forget, as in Mamba-2, and whose output is gated (Yang, Kautz & Hatamizadeh 2025,
    eq. 10 and fig. 1):

        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,  S' = a_t S_{t-1},
        a_t = exp(-exp(a_log) softplus(w_a x_t + bias)),  y_t = silu(W_g x_t) norm(S_t^T q_t / sqrt(K)).

    exp(a_log) starts uniform below 16 and softplus(bias) log-uniform on [.001, .1]. Heads of values are as wide as
    heads of keys here.
    """

    def __init__(self, width: int, *, heads: int, rngs: nnx.Rngs, **options):
        super().__init__(width, heads=heads, rngs=rngs, **options)
        self.decay = Linear(width, heads, use_bias=False, rngs=rngs)
        self.decay_bias = Recurrence(step_bias(rngs.params(), heads))
        rate = jax.random.uniform(rngs.params(), (heads,), minval=0.01, maxval=16.0)  # 0 has no logarithm
        self.a_log = Recurrence(jnp.log(rate))
        self.gate = Linear(width, width, use_bias=False, rngs=rngs)

    def log_decay(self, x: Float[Array, "T B D"]) -> Float[Array, "T B H"]:
        step = self.decay(x).astype(jnp.float32)
        step = jax.nn.softplus(step + jnp.broadcast_to(self.decay_bias[...], step.shape))
        return -step * jnp.broadcast_to(jnp.exp(self.a_log[...]), step.shape)

    def gated(self, y: Float[Array, "T B D"], x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        return jax.nn.silu(self.gate(x)) * y
