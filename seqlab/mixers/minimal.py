"""Recurrent networks whose gates look at the token alone, so that their recurrence is linear: minGRU and minLSTM."""

from abc import abstractmethod
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.mixers.base import Recurrent, negative
from seqlab.recurrence import Marks, linear_recurrence
from seqlab.types import State

Gates = dict[str, Float[Array, "... N"]]


class Minimal(Recurrent):
    """h_t = s(l_t) h_{t-1} + s(-l_t) g(W x_t + b) with s the logistic function and the gates as one logit l_t.

    s(-l) stands for 1 - s(l), which would cancel. g(x) = x + 1/2 for x >= 0, else s(x), is positive and continuous, as
    the scan over logarithms of the paper needs it (Feng et al. 2024, app. B.2.1); here it keeps the two comparable.

    Args:
        eigenvalue_range: (0, 1), or (-1, 1): h_{t-1} is multiplied by 2 s(l) - 1 instead, so that a state can change
            its sign (Grazzi et al. 2025, sec. 4).

    Raises:
        ValueError: `eigenvalue_range` is another.
    """

    gates: tuple[str, ...]

    def __init__(
        self,
        width: int,
        *,
        state_size: int | None = None,
        eigenvalue_range: Sequence[int | float] = (0, 1),
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        self.state_size, self.scan, self.chunk = state_size or width, scan, chunk
        self.negative = negative(eigenvalue_range)
        names = (*self.gates, "new")
        self.inputs = nnx.data({name: Linear(width, self.state_size, rngs=rngs) for name in names})
        self.out = Linear(self.state_size, width, rngs=rngs)

    @abstractmethod
    def keep(self, drive: Gates) -> Float[Array, "... N"]:
        """The logit of the share of the old state that stays."""

    def coefficients(self, drive: Gates) -> tuple[Float[Array, "... N"], Float[Array, "... N"]]:
        keep, new = self.keep(drive), drive["new"]
        decay = jnp.tanh(0.5 * keep) if self.negative else jax.nn.sigmoid(keep)  # 2 s(l) - 1 = tanh(l / 2)
        return decay, jax.nn.sigmoid(-keep) * jnp.where(new >= 0, new + 0.5, jax.nn.sigmoid(new))

    def init_state(self, batch: int, max_length: int) -> State:
        return jnp.zeros((batch, self.state_size), jnp.float32)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        drive = {name: linear(x).astype(jnp.float32) for name, linear in self.inputs.items()}
        state, states = linear_recurrence(self.coefficients, state, drive, marks, scan=self.scan, chunk=self.chunk)
        return state, self.out(states.astype(x.dtype))


class MinGRU(Minimal):
    """z = s(W_z x + b_z), h_t = (1 - z) h_{t-1} + z g(W x + b) (Feng et al. 2024, sec. 3.1)."""

    gates = ("update",)

    def keep(self, drive: Gates) -> Float[Array, "... N"]:
        return -drive["update"]


class MinLSTM(Minimal):
    """f, i = s(W x + b), h_t = f / (f + i) h_{t-1} + i / (f + i) g(W x + b) (Feng et al. 2024, sec. 3.2)."""

    gates = ("forget", "input")

    def keep(self, drive: Gates) -> Float[Array, "... N"]:
        # log f - log i: f / (f + i) itself is 0 / 0 where both gates are closed
        return jax.nn.log_sigmoid(drive["forget"]) - jax.nn.log_sigmoid(drive["input"])
