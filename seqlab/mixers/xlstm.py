"""xLSTM (Beck et al. 2024): memories that an exponential input gate writes and that a normaliser divides."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.matrix_memory import exponential_gating
from seqlab.mixers.base import Cell, Recurrence, Recurrent, head_width
from seqlab.mixers.convolution import ShortConvolution
from seqlab.recurrence import Marks
from seqlab.types import State

Gates = dict[str, Float[Array, "..."]]


def several(size: int, heads: int) -> int:
    """The width of a head, of more than one number: the norm of a single one is 0."""
    width = head_width(size, heads, "model.state_size")
    if width == 1:
        raise ValueError(f"model.heads={heads} leaves a head one of model.state_size={size} numbers; use fewer heads")
    return width


class HeadNorm(nnx.Module):
    """Each head [..., H, K] brought to mean 0 and variance 1; joined to [..., H K] and scaled number by number."""

    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.ones(size))

    def __call__(self, x: Float[Array, "... H K"]) -> Float[Array, "... N"]:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)
        scale = self.scale[...].astype(x.dtype).reshape(x.shape[-2:])
        x = x * jnp.broadcast_to(scale, x.shape)
        return x.reshape(*x.shape[:-2], self.scale.size)


class SLSTM(Cell):
    """A scalar memory for each unit (Beck et al. 2024, eqs. 8 to 18): with i, f, z, o = W x_t + b + R h_{t-1},

        c_t = s(f) c_{t-1} + exp(i) tanh(z),  n_t = s(f) n_{t-1} + exp(i),  h_t = s(o) c_t / n_t,

    where R mixes the units of one head only. Memory and normaliser are kept divided by exp(m_t),
    m_t = max(log s(f) + m_{t-1}, i), so that no exponential overflows; h does not depend on m, which needs no gradient.
    Each head of h is normalised before the output projection. As in the authors' code, the forget gate is logistic
    (the paper allows an exponential one), R starts at 0, and the forget gates of a head start with biases from 3 to 6.

    Raises:
        ValueError: the heads do not divide the state.
    """

    gates = ("input", "forget", "cell", "output")

    def __init__(self, width: int, *, state_size: int | None = None, heads: int = 4, rngs: nnx.Rngs):
        size = state_size or width
        self.heads, self.head_width = heads, several(size, heads)
        shape = (heads, self.head_width, self.head_width)
        # a bias of the input gate would multiply c and n alike
        self.inputs = nnx.data({gate: Linear(width, size, use_bias=gate != "input", rngs=rngs) for gate in self.gates})
        self.inputs["forget"].bias = nnx.Param(jnp.tile(jnp.linspace(3.0, 6.0, self.head_width), heads))
        self.recurrent = nnx.data({gate: Recurrence(jnp.zeros(shape)) for gate in self.gates})
        self.norm = HeadNorm(size)
        self.out = Linear(size, width, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        empty = jnp.zeros((batch, self.heads, self.head_width), jnp.float32)
        return {"hidden": empty, "cell": empty, "normaliser": empty, "log_scale": empty}

    def drive(self, x: Float[Array, "T B D"]) -> Gates:
        shape = (*x.shape[:2], self.heads, self.head_width)
        return {gate: linear(x).astype(jnp.float32).reshape(shape) for gate, linear in self.inputs.items()}

    def advance(self, state: State, drive: Gates) -> State:
        h = state["hidden"]
        gate = {name: drive[name] + jnp.einsum("BHK,HKJ->BHJ", h, r[...]) for name, r in self.recurrent.items()}
        kept, new = jax.nn.log_sigmoid(gate["forget"]) + state["log_scale"], gate["input"]
        kept = jnp.where(state["normaliser"] > 0, kept, new)  # an empty memory has no scale
        log_scale = jax.lax.stop_gradient(jnp.maximum(kept, new))
        keep, write = jnp.exp(kept - log_scale), jnp.exp(new - log_scale)
        cell = keep * state["cell"] + write * jnp.tanh(gate["cell"])
        normaliser = keep * state["normaliser"] + write  # at least 1, for the larger of the two gates is
        hidden = jax.nn.sigmoid(gate["output"]) * cell / normaliser
        return {"hidden": hidden, "cell": cell, "normaliser": normaliser, "log_scale": log_scale}

    def read(self, states: State, x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        return self.out(self.norm(states["hidden"]).astype(x.dtype))


class MLSTM(Recurrent):
    """A matrix memory for each head (Beck et al. 2024, eqs. 19 to 27): with i, f = w x_t + b, a number each,

        C_t = s(f) C_{t-1} + exp(i) v_t k_t^T,  n_t = s(f) n_{t-1} + exp(i) k_t,
        h_t = s(W_o x_t) norm(C_t q_t / max(|n_t q_t|, 1)),

    k divided by sqrt(K). Memory and normaliser are kept divided by exp(m_t), see `exponential_gating`, and
    so is the 1. Queries and keys come from the tokens after a short convolution and SiLU (app., fig. 11). As in the
    authors' code, the gates start blind to their token, with biases of N(0, 0.1^2) and, over the heads, from 3 to 6.

    Args:
        convolution: tokens that the convolution spans; 0: none, as in xLSTM 7B (Beck et al. 2025).

    Raises:
        ValueError: the heads do not divide the state, `scan` is unknown, or `chunk` is below 1.
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int | None = None,
        heads: int = 4,
        convolution: int = 4,
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        size = state_size or width
        self.heads, self.head_width = heads, several(size, heads)
        self.scan, self.chunk = scan, chunk
        self.convolution = ShortConvolution(width, size=convolution, rngs=rngs) if convolution else None
        self.query, self.key, self.value, self.output_gate = (
            Linear(width, size, use_bias=False, rngs=rngs) for _ in range(4)
        )
        zeros = nnx.initializers.zeros
        self.input_gate, self.forget_gate = (Linear(width, heads, kernel_init=zeros, rngs=rngs) for _ in range(2))
        self.input_gate.bias = nnx.Param(0.1 * jax.random.normal(rngs.params(), (heads,)))
        self.forget_gate.bias = nnx.Param(jnp.linspace(3.0, 6.0, heads))
        self.norm = HeadNorm(size)
        self.out = Linear(size, width, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        state = {
            "memory": jnp.zeros((batch, self.heads, self.head_width, self.head_width + 1), jnp.float32),
            "log_scale": jnp.zeros((batch, self.heads), jnp.float32),
        }
        return state | ({"inputs": self.convolution.init_state(batch, max_length)} if self.convolution else {})

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        after, seen = {}, x
        if self.convolution is not None:
            after["inputs"], seen = self.convolution.run(state["inputs"], x, marks)
            seen = jax.nn.silu(seen)

        def heads(x: Float[Array, "T B N"]) -> Float[Array, "T B H K"]:
            return x.astype(jnp.float32).reshape(*x.shape[:2], self.heads, self.head_width)

        q, k, v = heads(self.query(seen)), heads(self.key(seen)) / self.head_width**0.5, heads(self.value(x))
        ones = jnp.ones((*v.shape[:-1], 1), jnp.float32)  # what the normaliser remembers
        (after["memory"], after["log_scale"]), (read, log_scale) = exponential_gating(
            (state["memory"], state["log_scale"]),
            q,
            k,
            jnp.concatenate([v, ones], axis=-1),
            self.input_gate(x).astype(jnp.float32),
            jax.nn.log_sigmoid(self.forget_gate(x).astype(jnp.float32)),
            marks,
            scan=self.scan,
            chunk=self.chunk,
        )
        one = jnp.exp(-jnp.maximum(log_scale, -80.0))[..., None]  # as good as infinite there
        # 1e-6 as in the authors' code: one underflows, and a query may meet no key
        h = read[..., :-1] / (jnp.maximum(jnp.abs(read[..., -1:]), one) + 1e-6)
        return after, self.out(jax.nn.sigmoid(self.output_gate(x)) * self.norm(h).astype(x.dtype))
