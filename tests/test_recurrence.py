"""Both scans against a numpy loop in complex128, forward and by its adjoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.recurrence import linear_recurrence, unroll

T, B, N = 13, 2, 3
# every state is a sum of at most 13 terms of size 1 that decay: each step rounds a few times by 2^-24 of some 10
ATOL = 1e-5


def draw(kind, masked):
    """Decay, drive, start, mask and the weights of a read-out, with |a| near 1 so that nothing is forgotten."""
    rng = np.random.default_rng(0)
    a = rng.uniform(0.8, 1, N) * np.exp(1j * rng.uniform(0, 6, N))
    b, start, readout = (
        rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in ((T, B, N), (B, N), (T, B, N))
    )
    numbers = (a, b, start, readout) if kind == "complex" else tuple(x.real for x in (a, b, start, readout))
    return *numbers, rng.random((T, B)) < 0.6 if masked else None


def loop(a, b, start, mask):
    h, states = start, []
    for t in range(T):
        new = a * h + b[t]
        h = new if mask is None else np.where(mask[t][:, None], new, h)
        states.append(h)
    return np.array(states)


def adjoint(a, states, start, readout, mask):
    """Gradients of Re <readout, states> by the decay, the drive and the start."""
    flow, by_a, by_b = np.zeros_like(start), np.zeros_like(a), np.zeros_like(readout)
    for t in reversed(range(T)):
        flow = flow + readout[t]
        moved = np.ones((B, 1), bool) if mask is None else mask[t][:, None]
        by_b[t] = np.where(moved, flow, 0)
        by_a += (by_b[t] * np.conj(states[t - 1] if t else start)).sum(0)
        flow = np.where(moved, np.conj(a) * flow, flow)
    return by_a, by_b, flow


def pairs(x):
    """A complex array as the code holds it, a real one as it is."""
    return tuple(jnp.asarray(part, jnp.float32) for part in (x.real, x.imag)) if np.iscomplexobj(x) else jnp.float32(x)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_states_and_gradients_are_those_of_a_loop(scan, kind, masked):
    a, b, start, readout, mask = draw(kind, masked)
    states = loop(a, b, start, mask)

    def run(a, b, start):
        return linear_recurrence(a, b, start, None if mask is None else jnp.asarray(mask), scan)

    @jax.jit
    def both(a, b, start, readout):
        h, pull = jax.vjp(run, a, b, start)
        return h, pull(readout)

    h, gradients = both(*map(pairs, (a, b, start, readout)))
    for actual, reference in zip((h, *gradients), (states, *adjoint(a, states, start, readout, mask)), strict=True):
        scale = np.abs(reference).max()
        for part, reference_part in zip(jax.tree.leaves(actual), jax.tree.leaves(pairs(reference)), strict=True):
            np.testing.assert_allclose(part, reference_part, atol=ATOL * max(scale, 1), rtol=0)


@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_a_slow_decay_survives_inputs_in_bfloat16(scan):
    # .999 ** 1000 is .37; in bfloat16 it would be 1
    h = linear_recurrence(jnp.float32([0.999]), jnp.zeros((1000, 1, 1), jnp.bfloat16), jnp.ones((1, 1)), scan=scan)
    assert h.dtype == jnp.float32
    # a thousand roundings of 2^-24 and that of .999 itself, a thousand times: 1.2e-4
    np.testing.assert_allclose(h[-1, 0, 0], 0.999**1000, rtol=1.2e-4)


@pytest.mark.parametrize(("backend", "sequential"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_auto_goes_step_by_step_on_a_cpu_alone(backend, sequential, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    program = jax.make_jaxpr(lambda b: linear_recurrence(jnp.ones(N), b, jnp.zeros((B, N))))(jnp.ones((T, B, N)))
    assert ("scan" in {equation.primitive.name for equation in program.eqns}) == sequential


def test_an_unknown_scan_is_named():
    with pytest.raises(ValueError, match=r"^scan=chunks is unknown; use one of auto, sequential, associative$"):
        linear_recurrence(jnp.ones(N), jnp.ones((T, B, N)), jnp.zeros((B, N)), scan="chunks")


@pytest.mark.parametrize("masked", [False, True])
def test_unroll_is_a_loop(masked):
    rng = np.random.default_rng(1)
    drive, mask = rng.normal(size=(T, B, N)), rng.random((T, B)) < 0.6
    start = {"h": rng.normal(size=(B, N)), "c": rng.normal(size=(B, N))}
    states, expected = start, []
    for t in range(T):
        new = {"h": np.tanh(states["c"] + drive[t]), "c": 0.5 * states["c"] - states["h"]}
        states = {name: np.where(mask[t][:, None] | (not masked), new[name], states[name]) for name in new}
        expected.append(states)

    def advance(s, drive):
        return {"h": jnp.tanh(s["c"] + drive), "c": 0.5 * s["c"] - s["h"]}

    single = jax.tree.map(jnp.float32, (start, drive))
    actual = unroll(advance, *single, jnp.asarray(mask) if masked else None)
    for name in start:
        np.testing.assert_allclose(actual[name], [s[name] for s in expected], atol=ATOL, rtol=0)
