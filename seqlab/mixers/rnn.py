"""Recurrent networks whose state must be computed one step after another: Elman, GRU, LSTM.

Each gate has a matrix and an array of its own: on a CPU slicing one wide product into gates costs more than the
product itself.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.mixers.base import Cell, Recurrence
from seqlab.types import State

Gates = dict[str, Float[Array, "... N"]]
orthogonal = nnx.initializers.orthogonal()


class GatedCell(Cell):
    """The parts that the three networks share: one input projection and one recurrent matrix a gate, and a read-out."""

    gates: tuple[str, ...]

    def __init__(self, width: int, *, state_size: int | None = None, rngs: nnx.Rngs):
        self.state_size = state_size or width
        size = self.state_size
        self.inputs = nnx.data({gate: Linear(width, size, rngs=rngs) for gate in self.gates})
        self.recurrent = nnx.data({gate: Recurrence(orthogonal(rngs.params(), (size, size))) for gate in self.gates})
        self.out = Linear(size, width, rngs=rngs)

    def drive(self, x: Float[Array, "T B D"]) -> Gates:
        return {gate: linear(x).astype(jnp.float32) for gate, linear in self.inputs.items()}

    def recur(self, h: Float[Array, "B N"], gate: str) -> Float[Array, "B N"]:
        return h @ self.recurrent[gate][...]

    def init_state(self, batch: int, max_length: int) -> State:
        return jnp.zeros((batch, self.state_size), jnp.float32)

    def read(self, states: State, x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        return self.out(states.astype(x.dtype))


class Elman(GatedCell):
    """h_t = tanh(W x_t + U h_{t-1} + b) (Elman 1990)."""

    gates = ("hidden",)

    def advance(self, state: State, drive: Gates) -> State:
        return jnp.tanh(drive["hidden"] + self.recur(state, "hidden"))


class GRU(GatedCell):
    """r = s(W_r x + U_r h), z = s(W_z x + U_z h), n = tanh(W_n x + r (U_n h + b_n)), h' = (1 - z) n + z h
    (Cho et al. 2014, with the reset gate after the recurrent product as in cuDNN).
    """

    gates = ("reset", "update", "new")

    def __init__(self, width: int, *, state_size: int | None = None, rngs: nnx.Rngs):
        super().__init__(width, state_size=state_size, rngs=rngs)
        self.recurrent_bias = Recurrence(jnp.zeros(self.state_size))

    def advance(self, state: State, drive: Gates) -> State:
        reset = jax.nn.sigmoid(drive["reset"] + self.recur(state, "reset"))
        update = jax.nn.sigmoid(drive["update"] + self.recur(state, "update"))
        new = jnp.tanh(drive["new"] + reset * (self.recur(state, "new") + self.recurrent_bias[...][None]))
        return (1.0 - update) * new + update * state


class LSTM(GatedCell):
    """i, f, o = s(W x + U h + b), g = tanh(W_g x + U_g h + b_g), c' = f c + i g, h' = o tanh(c')
    (Hochreiter & Schmidhuber 1997; the forget gate's bias starts at 1, Jozefowicz et al. 2015).
    """

    gates = ("input", "forget", "cell", "output")

    def __init__(self, width: int, *, state_size: int | None = None, rngs: nnx.Rngs):
        super().__init__(width, state_size=state_size, rngs=rngs)
        self.inputs["forget"].bias = nnx.Param(jnp.ones(self.state_size))

    def init_state(self, batch: int, max_length: int) -> State:
        empty = super().init_state(batch, max_length)
        return {"hidden": empty, "cell": empty}

    def advance(self, state: State, drive: Gates) -> State:
        h = state["hidden"]
        gate = {name: jax.nn.sigmoid(drive[name] + self.recur(h, name)) for name in ("input", "forget", "output")}
        new = jnp.tanh(drive["cell"] + self.recur(h, "cell"))
        cell = gate["forget"] * state["cell"] + gate["input"] * new
        return {"hidden": gate["output"] * jnp.tanh(cell), "cell": cell}

    def read(self, states: State, x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        return super().read(states["hidden"], x)
