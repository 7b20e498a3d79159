"""All forms of the recurrences against a numpy loop in complex128, forward and by its adjoint."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.recurrence import SCANS, Marks, chunks, linear_recurrence, unroll, where

T, B, N = 13, 2, 3
# every state is a sum of at most 13 terms of size 1 that decay: each step rounds a few times by 2^-24 of some 10
ATOL = 1e-5
# to compile is all that takes time here
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FORMS = [("sequential", 64), ("associative", 64), *(("chunked", chunk) for chunk in (1, 7, 64, T))]


def draw(kind, marked, length=T):
    """Decays, drive, start, the weights of a read-out of all states and of the last, and starts and padding anywhere.

    |a| is near 1, so that nothing is forgotten.
    """
    rng = np.random.default_rng(0)
    a = rng.uniform(0.8, 1, (length, B, N)) * np.exp(1j * rng.uniform(0, 6, (length, B, N)))
    shapes = (length, B, N), (B, N), (length, B, N), (B, N)
    numbers = [a, *(rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in shapes)]
    if kind == "real":
        numbers = [x.real for x in numbers]
    real = rng.random((length, B)) < 0.6
    return *numbers, (real & (rng.random((length, B)) < 0.3), real) if marked else None


def unmarked(length):
    return np.zeros((length, B), bool), np.ones((length, B), bool)


def loop(a, b, start, marks):
    h, states = start, [np.zeros((0, *start.shape), start.dtype)]
    for a_t, b_t, starts, real in zip(a, b, *(marks or unmarked(len(a))), strict=True):
        h = np.where(starts[:, None], 0, h)
        h = np.where(real[:, None], a_t * h + b_t, h)
        states.append(h[None])
    return h, np.concatenate(states)


def adjoint(a, states, start, readout, flow, marks):
    """Gradients of Re <readout, states> + Re <flow, last state> by the decays, the drive and the start."""
    by_a, by_b = np.zeros_like(readout), np.zeros_like(readout)
    starts, real = marks or unmarked(len(a))
    for t in reversed(range(len(a))):
        flow = flow + readout[t]
        before = np.where(starts[t][:, None], 0, states[t - 1] if t else start)
        by_b[t] = np.where(real[t][:, None], flow, 0)
        by_a[t] = by_b[t] * np.conj(before)
        flow = np.where(real[t][:, None], np.conj(a[t]) * flow, flow)
        flow = np.where(starts[t][:, None], 0, flow)
    return by_a, by_b, flow


def pairs(x):
    """A complex array as the code holds it, a real one as it is."""
    return tuple(jnp.asarray(part, jnp.float32) for part in (x.real, x.imag)) if np.iscomplexobj(x) else jnp.float32(x)


def as_marks(marks):
    return None if marks is None else Marks(*map(jnp.asarray, marks))


def assert_close(actual, reference):
    for part, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(pairs(reference)), strict=True):
        assert part.shape == expected.shape and part.dtype == jnp.float32
        np.testing.assert_allclose(part, expected, atol=ATOL * max(np.abs(reference).max(initial=0), 1), rtol=0)


@pytest.mark.parametrize(
    ("kind", "marked", "length"),
    [*product(("real", "complex"), (False, True), [T]), ("complex", True, 1), ("complex", True, 0)],
)
@pytest.mark.parametrize(("scan", "chunk"), FORMS)
def test_states_and_gradients_are_those_of_a_loop(scan, chunk, kind, marked, length):
    a, b, start, readout, flow, marks = draw(kind, marked, length)
    last, states = loop(a, b, start, marks)

    def run(a, b, start):
        return linear_recurrence(lambda drive: drive, start, (a, b), as_marks(marks), emit, scan=scan, chunk=chunk)

    def emit(h, drive):
        return h

    @partial(jax.jit, compiler_options=QUICK)
    def both(a, b, start, weights):
        result, pull = jax.vjp(run, a, b, start)
        return result, pull(weights)

    result, gradients = both(*map(pairs, (a, b, start)), (pairs(flow), pairs(readout)))
    for actual, reference in zip(
        (*result, *gradients), (last, states, *adjoint(a, states, start, readout, flow, marks)), strict=True
    ):
        assert_close(actual, reference)


@pytest.mark.parametrize(("scan", "chunk"), FORMS)
def test_what_leaves_the_recurrence_may_depend_on_the_drive(scan, chunk):
    a, b, start, *_, marks = draw("real", marked=True)
    last, states = loop(a, b, start, marks)

    @partial(jax.jit, compiler_options=QUICK)
    def run(a, b, start):
        return linear_recurrence(
            lambda drive: (drive["a"], drive["b"]),
            start,
            {"a": a, "b": b},
            as_marks(marks),
            lambda h, drive: {"sum": (h * drive["b"]).sum(-1)},
            scan=scan,
            chunk=chunk,
        )

    actual = run(*map(pairs, (a, b, start)))
    assert_close(actual[0], last)
    assert_close(actual[1]["sum"], (states * b).sum(-1))


def test_the_sequential_form_stores_no_state_that_is_not_asked_for():
    def run(b):
        return linear_recurrence(
            lambda b: (b[..., None] * jnp.ones(N), b[..., None] * jnp.ones(N)),
            jnp.zeros((B, N)),
            b,
            emit=lambda h, b: h.sum(-1),
            scan="sequential",
        )

    with jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(run)(jnp.ones((T, B)))
    assert {v.aval.shape for equation in program.eqns for v in equation.outvars} <= {(B, N), (T, B)}


@pytest.mark.parametrize(("scan", "chunk"), FORMS)
def test_a_slow_decay_survives_inputs_in_bfloat16(scan, chunk):
    # .999 ** 1000 is .37; in bfloat16 it would be 1
    def coefficients(b):
        return jnp.full(b.shape, 0.999, jnp.float32), b.astype(jnp.float32)

    drive = jnp.zeros((1000, 1, 1), jnp.bfloat16)
    last, states = linear_recurrence(coefficients, jnp.ones((1, 1)), drive, scan=scan, chunk=chunk)
    assert last.dtype == states.dtype == jnp.float32
    # a thousand roundings of 2^-24 and that of .999 itself, a thousand times: 1.2e-4
    np.testing.assert_allclose(states[-1, 0, 0], 0.999**1000, rtol=1.2e-4)
    assert (states[-1] == last).all()


@pytest.mark.parametrize(("backend", "sequential"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_auto_goes_step_by_step_on_a_cpu_alone(backend, sequential, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    program = jax.make_jaxpr(lambda b: linear_recurrence(lambda b: (b, b), jnp.zeros((B, N)), b))(jnp.ones((T, B, N)))
    assert ("scan" in {equation.primitive.name for equation in program.eqns}) == sequential


@pytest.mark.parametrize("length", [T, 1, 0])
def test_an_unknown_scan_and_an_empty_chunk_are_named(length):
    drive, start = jnp.ones((length, B, N)), jnp.zeros((B, N))
    with pytest.raises(
        ValueError, match=r"^scan=chunks is unknown; use one of auto, sequential, associative, chunked$"
    ):
        linear_recurrence(lambda b: (b, b), start, drive, scan="chunks")
    for scan in SCANS:
        with pytest.raises(ValueError, match=r"^chunk=0 must be at least 1$"):
            linear_recurrence(lambda b: (b, b), start, drive, scan=scan, chunk=0)


@pytest.mark.parametrize("marked", [False, True])
def test_unroll_is_a_loop(marked):
    rng = np.random.default_rng(1)
    drive, real = rng.normal(size=(T, B, N)), rng.random((T, B)) < 0.6
    begins = real & (rng.random((T, B)) < 0.3)
    if not marked:
        begins, real = unmarked(T)
    start = {"h": rng.normal(size=(B, N)), "c": rng.normal(size=(B, N))}
    state, expected = start, []
    for t in range(T):
        state = {name: np.where(begins[t][:, None], 0, part) for name, part in state.items()}
        new = {"h": np.tanh(state["c"] + drive[t]), "c": 0.5 * state["c"] - state["h"]}
        state = {name: np.where(real[t][:, None], new[name], state[name]) for name in new}
        expected.append(state)

    def advance(s, drive):
        return {"h": jnp.tanh(s["c"] + drive), "c": 0.5 * s["c"] - s["h"]}

    single = jax.tree.map(jnp.float32, (start, drive))
    marks = as_marks((begins, real)) if marked else None
    last, states = unroll(advance, *single, marks)
    again, products = unroll(advance, *single, marks, lambda s, drive: s["h"] * drive)
    for name in start:
        np.testing.assert_allclose(states[name], [s[name] for s in expected], atol=ATOL, rtol=0)
        assert (last[name] == states[name][-1]).all() and (again[name] == last[name]).all()
    assert_close(products, np.array([s["h"] for s in expected]) * drive)


def test_marks_are_those_of_the_segments():
    assert Marks.of(None) is None
    marks = Marks.of(jnp.array([[1, 1, 2, 2, 0], [0, 4, 0, 4, 1]]))
    assert marks.start.T.tolist() == [[False, False, True, False, False], [False, False, False, False, True]]
    assert marks.real.T.tolist() == [[True, True, True, True, False], [False, True, False, True, True]]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("size", [1, 5, T, 20])
def test_chunks_are_the_sequence_with_padding_behind(size, marked):
    drive = {"b": np.arange(T * B * N).reshape(T, B, N), "a": np.arange(T * B).reshape(T, B)}
    begins, real = draw("real", True)[-1]
    cut, marks = chunks(jax.tree.map(jnp.asarray, drive), as_marks((begins, real)) if marked else None, size)
    for name, whole in drive.items():
        assert cut[name].shape[1] == size
        joined = np.concatenate(cut[name])
        assert (joined[:T] == whole).all() and (joined[T:] == 0).all()
    if marks is None:
        assert not marked and T % size == 0
    else:
        whole = (begins, real) if marked else unmarked(T)
        for part, expected in zip(marks, whole, strict=True):
            joined = np.concatenate(part)
            assert (joined[:T] == expected).all() and not joined[T:].any()


def test_where_chooses_by_the_leading_axes_of_all_leaves():
    condition = jnp.array([[True, False]])
    x, y = {"h": jnp.ones((1, 2, 3)), "c": jnp.ones((1, 2))}, {"h": jnp.zeros((1, 2, 3)), "c": jnp.zeros((1, 2))}
    for other in (y, 0.0):
        chosen = where(condition, x, other)
        assert chosen["h"].tolist() == [[[1, 1, 1], [0, 0, 0]]] and chosen["c"].tolist() == [[1, 0]]
