"""Selective state-space models: a linear recurrence whose step, input and read-out depend on the token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from seqlab.linear import Linear
from seqlab.matrix_memory import linear_attention
from seqlab.mixers.base import Recurrence, Recurrent, divisors, head_width, negative
from seqlab.mixers.convolution import ShortConvolution
from seqlab.recurrence import Marks, chosen, chunks, linear_recurrence
from seqlab.types import PRNGKey, State

Drive = tuple[Float[Array, "..."], ...]


def step_bias(key: PRNGKey, size: int) -> Float[Array, " size"]:
    """The b at which softplus(b) is log-uniform on [.001, .1] (Gu & Dao 2023, sec. 3.6)."""
    step = jnp.exp(jax.random.uniform(key, (size,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


class Mamba(Recurrent):
    """The block of Mamba (Gu & Dao 2023, algorithm 2 and fig. 3), for each of E = expand * D channels e:

        u = silu(conv(W_u x)),  (r, b, c) = W_s u,  delta = softplus(W_d r + bias)
        h_t[n] = exp(delta_t[e] A[n, e]) h_{t-1}[n] + delta_t[e] b_t[n] u_t[e],  A = -exp(a_log)
        y_t[e] = sum_n c_t[n] h_t[n] + d[e] u_t[e],  output W_o (y * silu(W_z x))

    with r of width ceil(D / 16). With `eigenvalue_range` [-1, 1] the decay is 2 exp(delta A) - 1 (Grazzi et al. 2025).
    The state is the last inputs of the convolution and h [B, N, E].

    Args:
        state_size: N, for each channel.
        expand: E / D.
        convolution: how many tokens the convolution sees.
        chunk: how many steps the chunked form takes at once, and how many the sequential one recomputes at once in its
            backward pass.

    Raises:
        ValueError: `eigenvalue_range` is neither [0, 1] nor [-1, 1], a size is below 1, or the scan is unknown.
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int = 16,
        expand: int = 2,
        convolution: int = 4,
        eigenvalue_range: Sequence[int | float] = (0, 1),
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        for name, value in (("state_size", state_size), ("expand", expand), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        inner, rank = expand * width, -(-width // 16)
        self.state_size, self.rank, self.scan, self.chunk = state_size, rank, scan, chunk
        self.negative = negative(eigenvalue_range)
        self.inputs = Linear(width, inner, use_bias=False, rngs=rngs)
        self.gate = Linear(width, inner, use_bias=False, rngs=rngs)
        self.convolution = ShortConvolution(inner, size=convolution, rngs=rngs)
        self.select = Linear(inner, rank + 2 * state_size, use_bias=False, rngs=rngs)
        bound = rank**-0.5
        self.delta = nnx.Param(jax.random.uniform(rngs.params(), (rank, inner), minval=-bound, maxval=bound))
        self.delta_bias = Recurrence(step_bias(rngs.params(), inner))
        # S4D-Real: decay rates 1..N for each channel (Gu & Dao 2023, sec. 3.6)
        rates = jnp.arange(1, state_size + 1, dtype=jnp.float32)
        self.a_log = Recurrence(jnp.log(jnp.broadcast_to(rates[:, None], (state_size, inner))))
        self.d = nnx.Param(jnp.ones(inner))
        self.out = Linear(inner, width, use_bias=False, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        return {
            "inputs": self.convolution.init_state(batch, max_length),
            "hidden": jnp.zeros((batch, *self.a_log.shape), jnp.float32),
        }

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        inputs, u = self.convolution.run(state["inputs"], self.inputs(x), marks)
        u = jax.nn.silu(u)
        r, b, c = jnp.split(self.select(u), (self.rank, self.rank + self.state_size), axis=-1)
        delta = (r @ self.delta[...]).astype(jnp.float32)
        delta = jax.nn.softplus(delta + jnp.broadcast_to(self.delta_bias[...], delta.shape))
        drive = (delta, *(part.astype(jnp.float32) for part in (u, b, c)))
        hidden, y = self.scanned(state["hidden"], drive, marks)
        y = y.astype(x.dtype) + u * jnp.broadcast_to(self.d[...], u.shape)
        return {"inputs": inputs, "hidden": hidden}, self.out(y * jax.nn.silu(self.gate(x)))

    def scanned(
        self, start: Float[Array, "B N E"], drive: Drive, marks: Marks | None
    ) -> tuple[Float[Array, "B N E"], Float[Array, "T B E"]]:
        """The last state and what is read from all, which are never stored together.

        E is the last axis of a state: it is the longer one, so that vector units run along it.
        """
        a = -jnp.exp(self.a_log[...])
        form = chosen(self.scan, elsewhere="chunked")  # all states at once are N times the stream

        def coefficients(drive: Drive) -> tuple[Float[Array, "... N E"], Float[Array, "... N E"]]:
            delta, u, b, _ = drive
            decay = jnp.exp(delta[..., None, :] * jnp.broadcast_to(a, (*delta.shape[:-1], *a.shape)))
            return 2.0 * decay - 1.0 if self.negative else decay, (delta * u)[..., None, :] * b[..., None]

        def read(hidden: Float[Array, "... N E"], drive: Drive) -> Float[Array, "... E"]:
            return (hidden * drive[-1][..., None]).sum(axis=-2)

        def block(start: Float[Array, "B N E"], inputs: tuple[Drive, Marks | None]):
            inner = "sequential" if form == "sequential" else "associative"
            return linear_recurrence(coefficients, start, *inputs, read, scan=inner)

        length = len(drive[0])
        if form == "associative" or length <= self.chunk:
            return block(start, (drive, marks))
        # the backward pass keeps the state between chunks alone and recomputes the others
        block = jax.checkpoint(block, prevent_cse=False)
        last, y = jax.lax.scan(block, start, chunks(drive, marks, self.chunk))
        return last, y.reshape(-1, *y.shape[2:])[:length]


class Mamba2(Recurrent):
    """The block of Mamba-2 (Dao & Gu 2024, fig. 6 right and sec. 7.1), whose E = expand * D channels are split into H
    heads of width P; each of G groups of heads shares its b and c:

        (u, b, c) = silu(conv(W_u x)),  delta = softplus(W_d x + bias)
        S_t = exp(delta_t A) S_{t-1} + b_t (delta_t u_t)^T,  y_t = S_t^T c_t + d u_t,  A = -exp(a_log)
        output W_o norm(y * silu(W_z x))

    where the norm divides each group of channels by its root mean square. The decay of a head is exponentiated as a sum
    of logarithms over many tokens, so that it cannot be negative: there is no `eigenvalue_range`. The state is the last
    inputs of the convolution and S [B, H, N, P].

    Args:
        state_size: N, for each channel.
        heads: H, each with a decay of its own.
        groups: G.
        expand: E / D.
        convolution: how many tokens the convolution sees.

    Raises:
        ValueError: the heads do not divide the channels, the groups not the heads, or a size is below 1.
    """

    def __init__(
        self,
        width: int,
        *,
        state_size: int = 64,
        heads: int = 4,
        groups: int = 1,
        expand: int = 2,
        convolution: int = 4,
        scan: str = "auto",
        chunk: int = 64,
        rngs: nnx.Rngs,
    ):
        for name, value in (("state_size", state_size), ("heads", heads), ("groups", groups), ("expand", expand)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        inner = expand * width
        head_width(inner, heads, f"{expand} x model.width")
        if heads % groups:
            raise ValueError(f"model.heads={heads} cannot share groups={groups}; groups that fit: {divisors(heads)}")
        self.state_size, self.heads, self.groups, self.scan, self.chunk = state_size, heads, groups, scan, chunk
        mixed = inner + 2 * groups * state_size
        self.inputs = Linear(width, mixed, use_bias=False, rngs=rngs)
        self.gate = Linear(width, inner, use_bias=False, rngs=rngs)
        self.convolution = ShortConvolution(mixed, size=convolution, rngs=rngs)
        self.delta = Linear(width, heads, use_bias=False, rngs=rngs)
        self.delta_bias = Recurrence(step_bias(rngs.params(), heads))
        self.a_log = Recurrence(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.d = nnx.Param(jnp.ones(heads))
        self.scale = nnx.Param(jnp.ones(inner))
        self.out = Linear(inner, width, use_bias=False, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        head_width = self.scale.shape[0] // self.heads
        return {
            "inputs": self.convolution.init_state(batch, max_length),
            "memory": jnp.zeros((batch, self.heads, self.state_size, head_width), jnp.float32),
        }

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        inputs, u = self.convolution.run(state["inputs"], self.inputs(x), marks)
        inner, keys = self.scale.shape[0], self.groups * self.state_size
        u, b, c = jnp.split(jax.nn.silu(u), (inner, inner + keys), axis=-1)
        u = u.reshape(*x.shape[:2], self.heads, inner // self.heads)
        delta = self.delta(x).astype(jnp.float32)
        delta = jax.nn.softplus(delta + jnp.broadcast_to(self.delta_bias[...], delta.shape))
        memory, y = linear_attention(
            state["memory"],
            self.shared(c),
            self.shared(b),
            delta[..., None] * u.astype(jnp.float32),
            -delta * jnp.broadcast_to(jnp.exp(self.a_log[...]), delta.shape),
            marks,
            scan=self.scan,
            chunk=self.chunk,
        )
        y = y.astype(x.dtype) + u * jnp.broadcast_to(self.d[...][:, None], u.shape)
        y = y.reshape(*x.shape[:2], inner) * jax.nn.silu(self.gate(x))
        return {"inputs": inputs, "memory": memory}, self.out(self.normed(y))

    def shared(self, x: Float[Array, "T B GN"]) -> Float[Array, "T B H N"]:
        """What a group has, for each of its heads."""
        x = x.reshape(*x.shape[:2], self.groups, 1, self.state_size)
        x = jnp.broadcast_to(x, (*x.shape[:3], self.heads // self.groups, self.state_size))
        return x.reshape(*x.shape[:2], self.heads, self.state_size)

    def normed(self, y: Float[Array, "T B E"]) -> Float[Array, "T B E"]:
        group = y.reshape(*y.shape[:2], self.groups, y.shape[2] // self.groups).astype(jnp.float32)
        group = group * jax.lax.rsqrt(jnp.mean(jnp.square(group), axis=-1, keepdims=True) + 1e-5)
        return group.reshape(y.shape).astype(y.dtype) * jnp.broadcast_to(self.scale[...], y.shape)
