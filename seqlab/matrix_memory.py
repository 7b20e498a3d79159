"""Recurrences whose state is a matrix a head, S_t [K, W]: keys write values into it and queries read them.

    S_t = a_t S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t

Token by token they are bound by the traffic of the state through memory. In chunks of C tokens the state moves once a
chunk, and all within a chunk is products of matrices (Hua et al. 2022; Sun et al. 2023; Yang et al. 2024a; Dao & Gu
2024):

    o = (e * q) S + (q k^T * D) v,   S' = e_C S + (f * k)^T v

where D_ij is what is left at token i of what token j wrote, e_i what is left at i of the state before the chunk, and f
the last row of D. Decays are logarithms, and only sums of them over the tokens in between, which are never above 0, are
exponentiated. All is time-major outside of a chunk, head-major [B, H, C, ...] within, and in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from seqlab.recurrence import Marks, chosen, chunks, unroll, where
from seqlab.types import State

Memory = Float[Array, "B H K W"]
Gates = Float[Array, "T B H"]
Square = Float[Array, "B H C C"]


def linear_attention(
    state: Memory,
    q: Float[Array, "T B H K"],
    k: Float[Array, "T B H K"],
    v: Float[Array, "T B H W"],
    log_decay: Gates | Float[Array, "T B H K"] | None = None,
    marks: Marks | None = None,
    *,
    scan: str = "auto",
    chunk: int = 32,
) -> tuple[Memory, Float[Array, "T B H W"]]:
    """S_t = a_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t: the last state, and all o.

    `log_decay`, log a_t <= 0, is one number a head (Sun et al. 2023; Dao & Gu 2024) or one a key channel (Yang et al.
    2024a, eq. 3); None is a = 1 (Katharopoulos et al. 2020).

    Raises:
        ValueError: `scan` is none of `recurrence.SCANS`, or `chunk` is below 1.
    """
    if log_decay is None:
        log_decay = jnp.zeros((len(q), 1, 1), jnp.float32)

    def advance(state: Memory, drive: tuple) -> Memory:
        _, k, v, log_decay = drive
        return jnp.exp(log_decay)[..., None] * state + k[..., None] * v[..., None, :]

    def block(state: Memory, drive: tuple, marks: Marks | None) -> tuple[Memory, Array]:
        q, k, v, log_decay = map(head_major, drive)
        return through(state, q, k, v, geometry(log_decay, marks))

    drive = (q, k, v, log_decay if log_decay.ndim == 4 else log_decay[..., None])
    return run(advance, read, block, state, drive, marks, scan, chunk)


def delta_rule(
    state: Memory,
    q: Float[Array, "T B H K"],
    k: Float[Array, "T B H K"],
    v: Float[Array, "T B H W"],
    beta: Gates,
    log_decay: Gates | None = None,
    marks: Marks | None = None,
    *,
    scan: str = "auto",
    chunk: int = 16,
) -> tuple[Memory, Float[Array, "T B H W"]]:
    """S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t: the last state, and all o.

    The value stored under a key moves towards v_t by the share beta_t (Schlag et al. 2021; a = 1) of a state that has
    decayed (Yang, Kautz & Hatamizadeh 2025, eq. 10); stable for keys of length 1 and beta in [0, 2]. This is linear
    attention with the values

        u_t = beta_t (v_t - a_t S_{t-1}^T k_t),

    which within a chunk solve (I + L) u = beta (v - (e * k) S), with L the strict lower triangle of beta (k k^T * D):
    the UT form of a product of Householder matrices (Joffrain et al. 2006; Yang et al. 2024b).

    Raises:
        ValueError: `scan` is none of `recurrence.SCANS`, or `chunk` is below 1.
    """
    if log_decay is None:
        log_decay = jnp.zeros((len(q), 1, 1), jnp.float32)

    def advance(state: Memory, drive: tuple) -> Memory:
        _, k, v, log_decay, beta = drive
        state = jnp.exp(log_decay)[..., None] * state
        u = beta * (v - jnp.einsum("BHK,BHKW->BHW", k, state))
        return state + k[..., None] * u[..., None, :]

    def block(state: Memory, drive: tuple, marks: Marks | None) -> tuple[Memory, Array]:
        q, k, v, log_decay, beta = map(head_major, drive)
        within = geometry(log_decay, marks)
        u = beta * (v - (within.kept * k) @ state)
        u = unit_inverse(beta * within.scores(k, k)) @ u
        return through(state, q, k, u, within)

    drive = (q, k, v, log_decay[..., None], beta[..., None])
    return run(advance, read, block, state, drive, marks, scan, chunk)


def exponential_gating(
    state: tuple[Memory, Float[Array, "B H"]],
    q: Float[Array, "T B H K"],
    k: Float[Array, "T B H K"],
    v: Float[Array, "T B H W"],
    log_input: Gates,
    log_forget: Gates,
    marks: Marks | None = None,
    *,
    scan: str = "auto",
    chunk: int = 32,
) -> tuple[tuple[Memory, Float[Array, "B H"]], tuple[Float[Array, "T B H W"], Gates]]:
    """S_t = f_t S_{t-1} + i_t k_t v_t^T, o_t = S_t^T q_t, with gates of any size, divided by exp(m_t) where

        m_t = max(log f_t + m_{t-1}, log i_t)

    (Beck et al. 2024, eqs. 15 and 19). The state is (S_t exp(-m_t), m_t), zeros before the first token; returns the
    last one, and all (o_t exp(-m_t), m_t). No gradient flows through m: it only chooses a scale.

    Raises:
        ValueError: `scan` is none of `recurrence.SCANS`, or `chunk` is below 1.
    """

    def advance(state: tuple, drive: tuple) -> tuple:
        memory, m = state
        _, k, v, *logs = drive
        log_input, log_forget = (log[..., 0] for log in logs)
        new = jax.lax.stop_gradient(jnp.maximum(log_forget + m, log_input))
        forget, enter = jnp.exp(log_forget + m - new), jnp.exp(log_input - new)
        return forget[..., None, None] * memory + (enter[..., None] * k)[..., None] * v[..., None, :], new

    def emit(state: tuple, drive: tuple) -> tuple[Array, Array]:
        return read(state[0], drive), state[1]

    def block(state: tuple, drive: tuple, marks: Marks | None) -> tuple[tuple, tuple[Array, Array]]:
        memory, m = state
        q, k, v, log_input, log_forget = map(head_major, drive)
        same, first = sequences(q.shape[2], marks)
        total = jnp.cumsum(log_forget, axis=2)
        before = total
        if marks is not None:  # the sum since a sequence began
            before = jnp.sum(jnp.where(same, log_forget.swapaxes(2, 3), 0.0), axis=3, keepdims=True)
            same &= marks.real.T[:, None, None]
        before = before + jnp.where(first, m[..., None, None], 0.0)
        passed = jnp.where(same, total - total.swapaxes(2, 3) + log_input.swapaxes(2, 3), -jnp.inf)
        new = jax.lax.stop_gradient(jnp.maximum(before, passed.max(axis=3, keepdims=True)))
        decay = jnp.exp(passed - new)
        kept = jnp.where(first, jnp.exp(before - new), 0.0)
        within = Geometry(lambda q, k: q @ k.swapaxes(2, 3) * decay, kept, decay[:, :, -1, :, None])
        memory, o = through(memory, q, k, v, within)
        m = new[..., 0].transpose(2, 0, 1)
        return (memory, m[-1]), (o, m)

    drive = (q, k, v, log_input[..., None], log_forget[..., None])
    return run(advance, emit, block, state, drive, marks, scan, chunk)


class Geometry(NamedTuple):
    """What is left of the state and of what was written, within one chunk."""

    scores: Callable[[Array, Array], Array]
    """q [B, H, C, K], k [B, H, C, K] to q k^T * D [B, H, C, C]."""
    kept: Float[Array, "#B #H C #K"]
    """e: at each token, of the state before the chunk."""
    left: Float[Array, "#B #H C #K"]
    """f: after the last token, of what each token wrote."""


def geometry(log_decay: Float[Array, "#B #H C #K"], marks: Marks | None) -> Geometry:
    same, first = sequences(log_decay.shape[2], marks)
    total = jnp.cumsum(log_decay, axis=2)

    def scores(q: Array, k: Array) -> Square:
        if log_decay.shape[3] == 1:
            return q @ k.swapaxes(2, 3) * jnp.where(same, shrink(total - total.swapaxes(2, 3)), 0.0)

        def lower(first: Array, second: Array) -> Array:
            # What decays from a key to a query does so up to the end of the first half, and then from there: C log C
            # exponentials a channel where pairs of tokens take C^2, and none is of a positive number, as with 1 / decay
            (k_, _), (_, q_), (early, late) = (halves(x, first.shape[3]) for x in (k, q, total))
            middle = early[:, :, :, -1:]
            return (q_ * shrink(late - middle)) @ (k_ * shrink(middle - early)).swapaxes(3, 4)

        return jnp.where(same, by_halves(jnp.sum(q * k, axis=3), lower), 0.0)

    kept = jnp.where(first, jnp.exp(total), 0.0)
    left = jnp.where(same[:, :, -1, :, None], shrink(total[:, :, -1:] - total), 0.0)
    return Geometry(scores, kept, left)


def sequences(length: int, marks: Marks | None) -> tuple[Bool[Array, "#B 1 C C"], Bool[Array, "#B 1 C 1"]]:
    """Which tokens up to each token are of its sequence, and which tokens go on with the state before the chunk."""
    same = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if marks is None:
        return same, jnp.ones((1, 1, length, 1), bool)
    starts = jnp.cumsum(marks.start, axis=0).T[:, None, :, None]
    return same & (starts == starts.swapaxes(2, 3)), starts == 0


def shrink(log: Float[Array, "..."]) -> Float[Array, "..."]:
    """A decay from the difference of two sums, which may come out a rounding above 0."""
    return jnp.exp(jnp.where(log > 0, 0.0, log))


def through(state: Memory, q: Array, k: Array, v: Array, within: Geometry) -> tuple[Memory, Array]:
    """A chunk of linear attention: the state after it, and the outputs, time-major."""
    o = (within.kept * q) @ state + within.scores(q, k) @ v
    state = within.kept[:, :, -1, :, None] * state + (within.left * k).swapaxes(2, 3) @ v
    return state, o.transpose(2, 0, 1, 3)


def by_halves(diagonal: Float[Array, "B H C"], lower: Callable[[Array, Array], Array]) -> Square:
    """A lower triangular matrix from its diagonal up: at each of log C levels, `lower` gives what stands under the
    first and left of the second of two neighbouring blocks, all [B, H, n, size, size].
    """
    blocks = diagonal[..., None, None]
    while blocks.shape[2] > 1:
        first, second = blocks[:, :, 0::2], blocks[:, :, 1::2]
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=4)
        bottom = jnp.concatenate([lower(first, second), second], axis=4)
        blocks = jnp.concatenate([top, bottom], axis=3)
    return blocks[:, :, 0]


def halves(x: Float[Array, "B H C X"], size: int) -> tuple[Float[Array, "B H n S X"], Float[Array, "B H n S X"]]:
    """The first and the second of each two neighbouring blocks of `size` tokens."""
    x = x.reshape(*x.shape[:2], -1, 2, size, x.shape[3])
    return x[:, :, :, 0], x[:, :, :, 1]


def unit_inverse(x: Square) -> Square:
    """The inverse of I + L, L the strict lower triangle of x: by products alone, which are faster than substitution."""

    def lower(first: Array, second: Array) -> Array:
        n, size = first.shape[2:4]
        pairs = x.reshape(*x.shape[:2], n, 2, size, n, 2, size)[:, :, :, 1, :, :, 0]
        return -second @ jnp.moveaxis(jnp.diagonal(pairs, axis1=2, axis2=4), -1, 2) @ first

    return by_halves(jnp.ones(x.shape[:3], x.dtype), lower)


def read(state: Memory, drive: tuple) -> Float[Array, "B H W"]:
    return jnp.einsum("BHK,BHKW->BHW", drive[0], state)


def head_major(x: Float[Array, "C B H X"]) -> Float[Array, "B H C X"]:
    return x.transpose(1, 2, 0, 3)


def run(
    advance: Callable[[State, tuple], State],
    emit: Callable[[State, tuple], Any],
    block: Callable[[State, tuple, Marks | None], tuple[State, Any]],
    state: State,
    drive: tuple,
    marks: Marks | None,
    scan: str,
    chunk: int,
) -> tuple[State, Any]:
    """Token by token with `advance` and `emit`, or chunk by chunk with `block`; leaves of the drive are [T, B, ...]."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    form = chosen(scan, on_cpu="chunked", elsewhere="chunked")
    drive = tuple(x.astype(jnp.float32) for x in drive)
    length = len(drive[0])
    if form == "sequential" or length <= 1:
        return unroll(advance, state, drive, marks, emit)

    def body(state: State, inputs: tuple[tuple, Marks | None]) -> tuple[State, Any]:
        drive, marks = inputs
        if marks is not None:  # padding neither writes nor decays
            drive = where(marks.real, drive, 0.0)
        return block(state, drive, marks)

    size = length if form == "associative" else min(chunk, length)
    size = 1 << (size - 1).bit_length()  # a power of two, to be halved
    state, o = jax.lax.scan(body, state, chunks(drive, marks, size))
    return state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], o)
