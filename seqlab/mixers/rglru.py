"""The recurrent block of Griffin: a gated linear recurrence that keeps the variance of what it takes in."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqlab.linear import Linear
from seqlab.mixers.base import Recurrence, Recurrent, head_width, negative
from seqlab.mixers.convolution import ShortConvolution
from seqlab.recurrence import Marks, linear_recurrence
from seqlab.types import State

SHARPNESS = 8.0
"""c of Griffin (De et al. 2024, sec. 2.4)."""
STEEPEST = 1000.0
"""Slope of the root at most: that of sqrt grows without bound where a token decays nothing."""


@jax.custom_jvp
def root(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """sqrt(x), whose derivative is at most `STEEPEST`."""
    return jnp.sqrt(x)


@root.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (x,), (change,) = primals, tangents
    return root(x), change * jax.lax.rsqrt(jnp.maximum(4.0 * x, STEEPEST**-2))


class RGLRU(Recurrent):
    """Griffin's recurrent block (De et al. 2024, fig. 2c and eqs. 1-4), E channels wide:

        u = conv(W_u x),  r = sigmoid(W_r u),  i = sigmoid(W_i u),  log a = -8 r softplus(l)
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t),  output W_o (h * gelu(W_z x))

    where W_r and W_i have one block a head on their diagonals. The first token of a sequence has no past to share the
    variance with and enters without the root, as in the authors' code and not in their paper. With `eigenvalue_range`
    [-1, 1] the decay is 2 a - 1 (Grazzi et al. 2025), in the root as well. The state is the last inputs of the
    convolution, h [B, E], and whether there has been a token.

    Args:
        state_size: E; the width where nothing is said.
        heads: how many blocks the gates' matrices have.
        convolution: how many tokens the convolution sees.

    Raises:
        ValueError: `heads` does not divide `state_size`, or `eigenvalue_range` is neither [0, 1] nor [-1, 1].
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int | None = None,
        heads: int = 1,
        convolution: int = 4,
        eigenvalue_range: Sequence[int | float] = (0, 1),
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        inner = state_size or width
        self.negative, self.scan, self.chunk = negative(eigenvalue_range), scan, chunk
        self.inputs = Linear(width, inner, rngs=rngs)
        self.gate = Linear(width, inner, rngs=rngs)
        self.convolution = ShortConvolution(inner, size=convolution, rngs=rngs)

        size = head_width(inner, heads, "model.state_size")

        def blocks() -> nnx.Param:
            return nnx.Param(size**-0.5 * jax.random.normal(rngs.params(), (heads, size, size)))

        self.decay, self.decay_bias = blocks(), nnx.Param(jnp.zeros(inner))
        self.intake, self.intake_bias = blocks(), nnx.Param(jnp.zeros(inner))
        # exp(-8 softplus(l)), the decay where the gate is open, is uniform in area on the ring of .9 and .999 (De et
        # al. 2024, sec. 2.4); the authors' code leaves the 8 out
        area = jax.random.uniform(rngs.params(), (inner,), minval=0.9**2, maxval=0.999**2)
        self.rate = Recurrence(jnp.log(jnp.expm1(-0.5 / SHARPNESS * jnp.log(area))))
        self.out = Linear(inner, width, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        return {
            "inputs": self.convolution.init_state(batch, max_length),
            "hidden": jnp.zeros((batch, self.rate.shape[0]), jnp.float32),
            "begun": jnp.zeros(batch, bool),
        }

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        inputs, u = self.convolution.run(state["inputs"], self.inputs(x), marks)
        first, begun = firsts(state["begun"], len(x), marks)
        log_decay = jnp.broadcast_to(-SHARPNESS * jax.nn.softplus(self.rate[...]), u.shape)
        log_decay = log_decay * self.opened(u, self.decay, self.decay_bias)
        decay = jnp.exp(log_decay)
        if self.negative:  # 1 - (2 a - 1)^2 = 4 a (1 - a)
            decay, scale = 2.0 * decay - 1.0, root(-4.0 * decay * jnp.expm1(log_decay))
        else:
            scale = root(-jnp.expm1(2.0 * log_decay))
        scale = jnp.where(first[..., None], 1.0, scale)
        taken = scale * self.opened(u, self.intake, self.intake_bias) * u.astype(jnp.float32)
        hidden, h = linear_recurrence(
            lambda drive: drive, state["hidden"], (decay, taken), marks, scan=self.scan, chunk=self.chunk
        )
        y = self.out(h.astype(x.dtype) * jax.nn.gelu(self.gate(x)))
        return {"inputs": inputs, "hidden": hidden, "begun": begun}, y

    def opened(self, u: Float[Array, "T B E"], blocks: nnx.Param, bias: nnx.Param) -> Float[Array, "T B E"]:
        """How far a gate is open, from 0 to 1."""
        heads = u.reshape(*u.shape[:2], *blocks.shape[:2])
        x = jnp.einsum("TBHK,HKJ->TBHJ", heads, blocks[...]).reshape(u.shape)
        return jax.nn.sigmoid((x + jnp.broadcast_to(bias[...], u.shape)).astype(jnp.float32))


def firsts(begun: Bool[Array, " B"], length: int, marks: Marks | None) -> tuple[Bool[Array, "T B"], Bool[Array, " B"]]:
    """Which tokens are the first of their sequence, and whether each row's state has met a token after them all."""
    first = (jnp.arange(length) == 0)[:, None] & ~begun[None]
    if marks is None:
        return first, begun | (length > 0)
    return first | marks.start, begun | marks.real.any(axis=0)
