"""Long causal convolutions over a time-major sequence: by FFT, among packed sequences, and of a diagonal recurrence.

All are computed in float32 at full precision: what passes through thousands of tokens is no place for shortened floats.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from seqlab.recurrence import Marks, Number, chosen, linear_recurrence, multiply

Complex = tuple[Float[Array, "..."], Float[Array, "..."]]
DENSE = 128
"""Below how many tokens a convolution from one half of a block to the other is a matrix product, and no FFT."""


def long_convolution(
    h: Float[Array, "L D"], z: Float[Array, "L B D"], since: Int[Array, "T B"] | None, count: int
) -> Float[Array, "T B D"]:
    """`causal_convolution` at the last `count` of L tokens; what stands before these is taken for one sequence."""
    if count == 1:
        weights = h[::-1, None]
        if since is not None:
            weights = jnp.where((jnp.arange(len(h))[::-1, None] <= since)[..., None], weights, 0.0)
        return (jnp.broadcast_to(weights, z.shape) * z).sum(axis=0, keepdims=True)
    if since is not None:
        before = jnp.broadcast_to(jnp.arange(len(z) - count)[:, None], (len(z) - count, z.shape[1]))
        since = jnp.concatenate([before, since])
    return causal_convolution(h, z, since)[len(z) - count :]


def spectral(h: Float[Array, "..."], z: Float[Array, "..."], size: int) -> Float[Array, "..."]:
    """The convolution along the third axis from the end, cyclic with a period of `size` or the power of 2 above."""
    period = 1 << (size - 1).bit_length() if size > 1 else 1
    return jnp.fft.irfft(jnp.fft.rfft(h, period, axis=-3) * jnp.fft.rfft(z, period, axis=-3), period, axis=-3)


def toeplitz(h: Float[Array, "L D"], rows: int, columns: int, lag: int) -> Float[Array, "D rows columns"]:
    """h_{i - j + lag} for each channel, zero where this lag is negative or beyond those of h."""
    lags = jnp.arange(rows)[:, None] - jnp.arange(columns)[None] + lag
    inside = (lags >= 0) & (lags < len(h))
    return jnp.pad(h, ((0, 1), (0, 0)))[jnp.where(inside, lags, len(h))].transpose(2, 0, 1)


def causal_convolution(
    h: Float[Array, "L D"], z: Float[Array, "L B D"], since: Int[Array, "L B"] | None = None
) -> Float[Array, "L B D"]:
    """y_t = sum_l h_l z_{t - l}; with `since`, how many tokens of its sequence stand before each, over l <= since_t.

    One FFT over all would let a token see later ones and other sequences, if only in its rounding. So it goes by
    halves: what the left half of a block of 2s tokens adds to its right half is one convolution, and since only one
    sequence can lie across the middle, tokens of others are left out on both sides. Doubling s until a block holds all
    takes O(T log^2 T).
    """
    length = len(z)

    def blocks(x: Array, size: int) -> Array:
        return jnp.pad(x, ((0, -length % size), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

    def joined(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[:length]

    half = max(1, min(DENSE, length)) if since is None else 1
    y = joined(jnp.einsum("Dij,njBD->niBD", toeplitz(h, half, half, 0), blocks(z, half), precision="highest"))
    first = None if since is None else jnp.broadcast_to(jnp.arange(length)[:, None], since.shape) - since
    while half < length:
        left = blocks(z, 2 * half)[:, :half]
        middle = (2 * half * jnp.arange(len(left)) + half)[:, None, None]
        opened = None
        if first is not None:
            opened = blocks(first, 2 * half)[:, half:]  # first token of the sequence of each token on the right
            left = jnp.where((middle - half + jnp.arange(half)[None, :, None] >= opened[:, :1])[..., None], left, 0.0)
        if half < DENSE:
            added = jnp.einsum("Dij,njBD->niBD", toeplitz(h, half, half, half), left, precision="highest")
        else:
            added = spectral(h[None, : 2 * half, None], left, 2 * half)[:, half:]
        if opened is not None:
            added = jnp.where((opened < middle)[..., None], added, 0.0)
        y = y + joined(jnp.concatenate([jnp.zeros_like(added), added], axis=1))
        half *= 2
    return y


def modal_recurrence(
    a: Complex,
    c: Complex,
    start: Complex,
    x: Float[Array, "T B D"],
    marks: Marks | None,
    *,
    scan: str = "auto",
    chunk: int = 64,
) -> tuple[Number, Float[Array, "T B D"]]:
    """The last state of h_t = a h_{t-1} + x_t, and y_t = Re sum_n c_n h_tn; a and c are [D, N], the state [B, D, N].

    On all backends the chunked form is the one to choose: 5 times faster than the next on a CPU, in a tenth of the
    memory. The sequential form reads the outputs within the recurrence and stores all states for a gradient only.

    Raises:
        ValueError: `scan` is unknown, or `chunk` is below 1.
    """
    if chosen(scan, "chunked", "chunked") == "chunked" and len(x) > 1 and chunk > 0:
        return modal_convolution(a, c, start, x, marks, chunk)

    def coefficients(x: Float[Array, "... D"]) -> tuple[Complex, Complex]:
        shape = (*x.shape, a[0].shape[-1])
        decay = jnp.broadcast_to(a[0], shape), jnp.broadcast_to(a[1], shape)
        return decay, (jnp.broadcast_to(x[..., None], shape), jnp.zeros(shape, x.dtype))

    def emit(h: Complex, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        re, im = (jnp.broadcast_to(part, h[0].shape) for part in c)
        return (re * h[0] - im * h[1]).sum(axis=-1)

    return linear_recurrence(coefficients, start, x, marks, emit, scan=scan, chunk=chunk)


def modal_convolution(
    a: Complex, c: Complex, start: Complex, x: Float[Array, "T B D"], marks: Marks | None, chunk: int
) -> tuple[Number, Float[Array, "T B D"]]:
    """`modal_recurrence` chunk by chunk.

    Since a is the same for all tokens, the outputs of a chunk are a convolution of its inputs plus what remains of the
    state before it: products of matrices, and a state for each chunk in place of one for each token (as in Dao & Gu
    2024, sec. 6, whose decay differs from token to token but not within a head).
    """
    length, batch, width = x.shape
    size = min(chunk, length)
    missing = -length % size

    def cut(x: Array) -> Array:
        return jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

    x = cut(x)
    count = len(x)
    power = jax.lax.associative_scan(multiply, tuple(jnp.broadcast_to(part[None], (size, *part.shape)) for part in a))
    one = jnp.ones_like(a[0])[None], jnp.zeros_like(a[0])[None]
    power = tuple(jnp.concatenate(pair) for pair in zip(one, power, strict=True))  # a^0 .. a^size
    read = multiply(tuple(jnp.broadcast_to(part[None], power[0].shape) for part in c), power)
    kernel = read[0][:size].sum(axis=-1)

    if marks is None:
        newest, fresh, resets = x, None, None
        y = jnp.einsum("Dij,cjBD->ciBD", toeplitz(kernel, size, size, 0), x, precision="highest")
    else:
        begun = cut(marks.start).cumsum(axis=1)  # sequences that start in this chunk, up to each token
        newest, fresh = jnp.where((begun == begun[:, -1:])[..., None], x, 0.0), begun > 0
        resets = Marks(fresh[:, -1], jnp.ones((count, batch), bool))
        index = jnp.broadcast_to(jnp.arange(size)[None, :, None], begun.shape)
        since = index - jax.lax.cummax(jnp.where(cut(marks.start), index, 0), axis=1)
        rows = x.swapaxes(0, 1).reshape(size, count * batch, width)
        y = causal_convolution(kernel, rows, since.swapaxes(0, 1).reshape(size, -1))
        y = y.reshape(size, count, batch, width).swapaxes(0, 1)

    def steps(by: int) -> Callable[[Complex], tuple[Complex, Complex]]:
        re, im = (part[by] for part in power)
        return lambda drive: ((jnp.broadcast_to(re, drive[0].shape), jnp.broadcast_to(im, drive[0].shape)), drive)

    driven = tuple(jnp.einsum("jDN,cjBD->cBDN", part[:size][::-1], newest, precision="highest") for part in power)
    after = linear_recurrence(steps(size), start, driven, resets)[1]
    before = tuple(jnp.concatenate([first[None], rest[:-1]]) for first, rest in zip(start, after, strict=True))
    held = (
        jnp.einsum("iDN,cBDN->ciBD", part[1:], h, precision="highest") for part, h in zip(read, before, strict=True)
    )
    carried = next(held) - next(held)
    y = y + (carried if fresh is None else jnp.where(fresh[..., None], 0.0, carried))

    # the last state: token by token through the chunk in which the tokens of a row end
    tokens = jnp.full(batch, length) if marks is None else marks.real.sum(axis=0)
    row, at = jnp.arange(batch), jnp.maximum(tokens - 1, 0) // size
    ending = x[at, :, row].swapaxes(0, 1)[..., None]
    real = jnp.arange(size)[:, None] < (tokens - at * size)[None]
    starts = jnp.zeros_like(real) if marks is None else cut(marks.start)[at, :, row].T
    drive = tuple(
        jnp.broadcast_to(part, (*ending.shape[:-1], a[0].shape[-1])) for part in (ending, jnp.zeros_like(ending))
    )
    last, _ = linear_recurrence(
        steps(1), tuple(h[at, row] for h in before), drive, Marks(starts, real), lambda h, drive: None
    )
    return last, y.reshape(-1, batch, width)[:length]
