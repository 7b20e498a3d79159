"""Recurrences over a time-major sequence: h_t = a_t h_{t-1} + b_t, and the non-linear kind that must go step by step.

The linear recurrence has three equal forms. On a CPU the sequential one is bound by memory and wins; on a GPU or TPU
the parallel prefix (Blelloch 1990; Martin & Cundy 2018) needs log T steps in place of T, and running it chunk by chunk
bounds the memory it takes. All keep their state in float32, for in bfloat16 a decay of .999 rounds to 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from seqlab import types
from seqlab.types import State

Number = Any
"""A real array, or a complex one as the pair (real part, imaginary part) of real arrays."""

SCANS = ("auto", "sequential", "associative", "chunked")


def chosen(scan: str, on_cpu: str = "sequential", elsewhere: str = "associative") -> str:
    """The form of a recurrence that `scan` asks for: the one place that looks at the backend.

    Raises:
        ValueError: `scan` is none of `SCANS`.
    """
    if scan not in SCANS:
        raise ValueError(f"scan={scan} is unknown; use one of {', '.join(SCANS)}")
    if scan != "auto":
        return scan
    return on_cpu if jax.default_backend() == "cpu" else elsewhere


class Marks(NamedTuple):
    """Where a state does not simply go on."""

    start: Bool[Array, "..."]
    """[T, B]: a sequence starts, from an empty state; at a real token only."""
    real: Bool[Array, "..."]
    """[T, B]: False is padding, at which the state stands still."""

    @classmethod
    def of(cls, segments: Int[Array, "B T"] | None) -> "Marks | None":
        return None if segments is None else cls(types.starts(segments).T, segments.T > 0)


def multiply(x: Number, y: Number) -> Number:
    if not isinstance(x, tuple):
        return x * y
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def add(x: Number, y: Number) -> Number:
    return jax.tree.map(jnp.add, x, y)


def where(condition: Bool[Array, "..."], x: State, y: State) -> State:
    """Chooses by a condition over the leading axes of all leaves; `y` may be a number."""
    x_leaves, tree = jax.tree.flatten(x)
    y_leaves = [y] * len(x_leaves) if jax.tree.structure(y) != tree else jax.tree.leaves(y)

    def choose(x: Array, y: Array | float) -> Array:
        return jnp.where(condition.reshape(*condition.shape, *[1] * (x.ndim - condition.ndim)), x, y)

    return jax.tree.unflatten(tree, map(choose, x_leaves, y_leaves))


def unroll(
    advance: Callable[[State, Any], State],
    start: State,
    drive: Any,
    marks: Marks | None = None,
    emit: Callable[[State, Any], Any] = lambda state, drive: state,
) -> tuple[State, Any]:
    """The last state of h_t = advance(h_{t-1}, drive_t), and emit(h_t, drive_t) for all t: leaves [T, B, ...]."""

    def body(h, inputs):
        drive_t, marks_t = inputs
        if marks_t is not None:
            h = where(~marks_t.start, h, 0.0)
        new = advance(h, drive_t)
        if marks_t is not None:
            new = where(marks_t.real, new, h)
        return new, emit(new, drive_t)

    return jax.lax.scan(body, start, (drive, marks))


def linear_recurrence(
    coefficients: Callable[[Any], tuple[Number, Number]],
    start: Number,
    drive: Any,
    marks: Marks | None = None,
    emit: Callable[[Number, Any], Any] = lambda state, drive: state,
    *,
    scan: str = "auto",
    chunk: int = 64,
) -> tuple[Number, Any]:
    """The last state of h_t = a_t h_{t-1} + b_t with h_0 = `start`, and emit(h_t, drive_t) for all t.

    `coefficients` gives (a, b), of the same shape and in float32, and `emit` what leaves the recurrence; both take the
    drive of one step, leaves [B, ...], and of many, leaves [T, B, ...], so that the sequential form never stores what
    they can fuse. Leaves of the result are [T, B, ...].

    Raises:
        ValueError: `scan` is none of `SCANS`, or `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    form = chosen(scan)
    length = jax.tree.leaves(drive)[0].shape[0]
    if form == "sequential" or length <= 1:  # one token, or none

        def advance(h: Number, drive_t: Any) -> Number:
            a, b = coefficients(drive_t)
            return add(multiply(a, h), b)

        return unroll(advance, start, drive, marks, emit)
    block = partial(_parallel, coefficients, emit)
    if form == "associative":
        return block(start, (drive, marks))
    # states are computed anew for the gradient, or those of all chunks together would be stored after all
    block = jax.checkpoint(block, prevent_cse=False)
    last, emitted = jax.lax.scan(block, start, chunks(drive, marks, min(chunk, length)))
    return last, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], emitted)


def chunks(drive: Any, marks: Marks | None, size: int) -> tuple[Any, Marks | None]:
    """Leaves [T, B, ...] as [T / size, size, B, ...], where needed with padding behind, marked as such."""
    length, batch = jax.tree.leaves(drive)[0].shape[:2]
    missing = -length % size
    if missing and marks is None:
        marks = Marks(jnp.zeros((length, batch), bool), jnp.ones((length, batch), bool))

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(cut, (drive, marks))


def _parallel(
    coefficients: Callable[[Any], tuple[Number, Number]],
    emit: Callable[[Number, Any], Any],
    start: Number,
    inputs: tuple[Any, Marks | None],
) -> tuple[Number, Any]:
    """All steps at once, as a prefix of compositions of h -> a h + b."""
    drive, marks = inputs
    a, b = coefficients(drive)
    if marks is not None:
        still = (1.0, 0.0) if isinstance(a, tuple) else 1.0
        a = where(marks.real, where(~marks.start, a, 0.0), still)
        b = where(marks.real, b, 0.0)

    def compose(first, second):
        return multiply(first[0], second[0]), add(multiply(second[0], first[1]), second[1])

    decay, states = jax.lax.associative_scan(compose, (a, b))
    start = jax.tree.map(lambda h, all: jnp.broadcast_to(h[None], all.shape), start, decay)
    states = add(multiply(decay, start), states)
    return jax.tree.map(lambda x: x[-1], states), emit(states, drive)
