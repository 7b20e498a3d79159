"""Diagonal state-space models: a linear recurrence in the complex plane, run in parallel where that is faster."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqlab.mixers.base import Recurrence, Recurrent
from seqlab.recurrence import add, linear_recurrence, multiply
from seqlab.types import State

Complex = tuple[Float[Array, "..."], Float[Array, "..."]]


class LRU(Recurrent):
    """The Linear Recurrent Unit (Orvieto et al. 2023), all complex numbers as real pairs:

        h_t = l * h_{t-1} + g * (B x_t),  y_t = Re(C h_t) + d * x_t,  l = exp(-exp(nu) + i exp(theta))

    with l uniform on the ring r_min <= |l| <= r_max, phase in [0, max_phase], and g = sqrt(1 - |l|^2) at the start so
    that the state has the variance of its input. The output is gated: W_o (y * silu(W_g x)).
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 6.2832,
        scan: str = "auto",
        rngs: nnx.Rngs,
    ):
        if not 0 <= r_min < r_max < 1:
            raise ValueError(f"an LRU needs 0 <= r_min < r_max < 1, not r_min={r_min}, r_max={r_max}")
        self.state_size, self.scan = state_size, scan

        def uniform() -> Float[Array, " N"]:
            return jax.random.uniform(rngs.params(), (state_size,), minval=1e-6)

        def normal(rows: int, columns: int, variance: float) -> nnx.Param:
            return nnx.Param(variance**0.5 * jax.random.normal(rngs.params(), (rows, columns)))

        # uniform in area on the ring (Orvieto et al. 2023, lemma 3.2)
        nu = -0.5 * jnp.log(uniform() * (r_max**2 - r_min**2) + r_min**2)
        self.nu = Recurrence(jnp.log(nu))
        self.theta = Recurrence(jnp.log(uniform() * max_phase))
        self.gamma = Recurrence(0.5 * jnp.log(-jnp.expm1(-2.0 * nu)))
        self.b_re, self.b_im = (normal(width, state_size, 1 / (2 * width)) for _ in range(2))
        self.c_re, self.c_im = (normal(state_size, width, 1 / state_size) for _ in range(2))
        self.d = nnx.Param(jax.random.normal(rngs.params(), (width,)))
        self.gate = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    @property
    def decay(self) -> Complex:
        magnitude = jnp.exp(-jnp.exp(self.nu[...]))
        phase = jnp.exp(self.theta[...])
        return magnitude * jnp.cos(phase), magnitude * jnp.sin(phase)

    def drive(self, x: Float[Array, "... D"]) -> Complex:
        gamma = jnp.exp(self.gamma[...])
        b_x = ((x @ b[...]).astype(jnp.float32) for b in (self.b_re, self.b_im))
        re, im = (part * jnp.broadcast_to(gamma, part.shape) for part in b_x)
        return re, im

    def advance(self, state: State, drive: Complex) -> State:
        return add(multiply(jax.tree.map(lambda part: part[None], self.decay), state), drive)

    def states(self, drive: Complex, start: State, mask: Bool[Array, "T B"] | None) -> State:
        return linear_recurrence(self.decay, drive, start, mask, scan=self.scan)

    def read(self, state: State, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        re, im = (part.astype(x.dtype) for part in state)
        y = re @ self.c_re[...] - im @ self.c_im[...] + x * jnp.broadcast_to(self.d[...], x.shape)
        return self.out(y * jax.nn.silu(self.gate(x)))

    def init_state(self, batch: int, max_length: int) -> State:
        empty = jnp.zeros((batch, self.state_size), jnp.float32)
        return empty, empty
