"""Recurrences over a time-major sequence: h_t = a_t h_{t-1} + b_t, and the non-linear kind that must go step by step.

The linear recurrence has two equal forms. On a CPU the sequential one is bound by memory and wins; on a GPU or TPU the
parallel prefix (Blelloch 1990; Martin & Cundy 2018) needs log T steps in place of T. Both keep their state in float32,
for in bfloat16 a decay of .999 rounds to 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Number = Any
"""A real array, or a complex one as the pair (real part, imaginary part) of real arrays."""

SCANS = ("auto", "sequential", "associative")


def multiply(x: Number, y: Number) -> Number:
    if not isinstance(x, tuple):
        return x * y
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def add(x: Number, y: Number) -> Number:
    return jax.tree.map(jnp.add, x, y)


def linear_recurrence(
    a: Number, b: Number, start: Number, mask: Bool[Array, "T B"] | None = None, scan: str = "auto"
) -> Number:
    """All states h_1 .. h_T of h_t = a h_{t-1} + b_t with h_0 = `start`, in float32.

    Shapes: `a` [N], `b` [T, B, N], `start` [B, N]; result [T, B, N]. Where `mask` is False the state stands still.

    Raises:
        ValueError: `scan` is none of `SCANS`.
    """
    if scan not in SCANS:
        raise ValueError(f"scan={scan} is unknown; use one of {', '.join(SCANS)}")
    if scan == "auto":
        scan = "sequential" if jax.default_backend() == "cpu" else "associative"
    a, b = jax.tree.map(lambda x: x.astype(jnp.float32), (a, b))
    a = jax.tree.map(lambda x: x[None, None], a)
    if mask is not None:
        one = (1.0, 0.0) if isinstance(a, tuple) else 1.0
        b = jax.tree.map(lambda x: jnp.where(mask[..., None], x, 0.0), b)
        a = jax.tree.map(lambda x, still: jnp.where(mask[..., None], x, still), a, one)
    return _SEQUENTIAL_OR_PARALLEL[scan](a, b, start)


def _sequential(a: Number, b: Number, start: Number) -> Number:
    length = jax.tree.leaves(b)[0].shape[0]
    varying = jax.tree.leaves(a)[0].shape[0] == length

    def advance(h, inputs):
        a_t, b_t = inputs if varying else (jax.tree.map(lambda x: x[0], a), inputs)
        h = add(multiply(a_t, h), b_t)
        return h, h

    return jax.lax.scan(advance, start, (a, b) if varying else b)[1]


def _associative(a: Number, b: Number, start: Number) -> Number:
    def compose(first, second):
        return multiply(first[0], second[0]), add(multiply(second[0], first[1]), second[1])

    length = jax.tree.leaves(b)[0].shape[0]
    decay, states = jax.lax.associative_scan(
        compose, (jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape[1:])), a), b)
    )
    return add(multiply(decay, jax.tree.map(lambda x: x[None], start)), states)


_SEQUENTIAL_OR_PARALLEL = {"sequential": _sequential, "associative": _associative}


def unroll(advance: Callable[[Any, Any], Any], start: Any, inputs: Any, mask: Bool[Array, "T B"] | None = None) -> Any:
    """All states of h_t = advance(h_{t-1}, inputs_t): leaves [T, B, ...]. Where `mask` is False the state stays."""

    def body(h, inputs_t):
        drive, keep = inputs_t
        new = advance(h, drive)
        if keep is not None:
            new = jax.tree.map(lambda n, o: jnp.where(keep[:, None], n, o), new, h)
        return new, new

    return jax.lax.scan(body, start, (inputs, mask))[1]
