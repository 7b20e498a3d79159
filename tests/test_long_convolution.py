"""Long convolutions and the recurrence of diagonal modes against loops in float64 and complex128."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.long_convolution import DENSE, causal_convolution, long_convolution, modal_recurrence
from seqlab.recurrence import Marks

B, D = 3, 2
# to compile is most of what takes time here
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LENGTHS = [1, 2, 3, 40, 2 * DENSE + 9]  # the last needs an FFT from one half to the other

ROUNDING = 2e-6
"""Of the norm of the filter times that of the inputs: an FFT over 512 tokens rounds 9 times forth and 9 back, and each
time by some 2^-24 of the norm; a sum over 265 tokens by the square root of as many."""


def draw(length):
    """A filter, inputs, and how many tokens of its sequence stand before each token, in rows of random sequences."""
    rng = np.random.default_rng(length)
    h, z = rng.normal(size=(length, D)), rng.normal(size=(length, B, D))
    begins = rng.random((length, B)) < np.array([0.0, 0.02, 0.3])
    index = np.broadcast_to(np.arange(length)[:, None], begins.shape)
    return h, z, index - np.maximum.accumulate(np.where(begins, index, 0))


def loop(h, z, since=None):
    y = np.zeros(z.shape)
    for t, row in np.ndindex(z.shape[:2]):
        for lag in range((t if since is None else since[t, row]) + 1):
            y[t, row] += h[lag] * z[t - lag, row]
    return y


def assert_close(actual, expected, h, z):
    scale = np.linalg.norm(h, axis=0).max(initial=0) * np.linalg.norm(z, axis=0).max(initial=0)
    np.testing.assert_allclose(actual, expected, atol=ROUNDING * scale, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [*LENGTHS, 0])
def test_a_convolution_is_a_sum_within_each_sequence(length, packed):
    h, z, since = draw(length)
    actual = jax.jit(causal_convolution)(jnp.float32(h), jnp.float32(z), jnp.asarray(since) if packed else None)
    assert_close(actual, loop(h, z, since if packed else None), h, z)


@pytest.mark.parametrize("length", LENGTHS[2:])
def test_the_gradient_of_a_convolution_is_its_transpose(length):
    h, z, since = draw(length)
    readout = np.random.default_rng(0).normal(size=z.shape)

    @partial(jax.jit, compiler_options=QUICK)
    def gradients(h, z):
        return jax.vjp(lambda h, z: causal_convolution(h, z, jnp.asarray(since)), h, z)[1](jnp.float32(readout))

    by_h, by_z = gradients(jnp.float32(h), jnp.float32(z))
    expected_h, expected_z = np.zeros(h.shape), np.zeros(z.shape)
    for t, row in np.ndindex(z.shape[:2]):
        for lag in range(since[t, row] + 1):
            expected_h[lag] += readout[t, row] * z[t - lag, row]
            expected_z[t - lag, row] += readout[t, row] * h[lag]
    assert_close(by_z, expected_z, h, readout)
    assert_close(by_h / B, expected_h / B, z.sum(1), readout)  # a sum over the rows


@pytest.mark.parametrize("packed", [False, True])
def test_no_token_meets_a_later_one_or_another_sequence(packed):
    length = LENGTHS[-1]
    h, _, since = (jnp.asarray(part, part.dtype.name.replace("64", "32")) for part in draw(length))

    @jax.jit
    @jax.vmap
    def outputs(z):
        return causal_convolution(h, z, since if packed else None)

    # what an input at s alone does at t, for each s
    change = np.asarray(outputs(jnp.eye(length)[:, :, None, None] * jnp.ones((1, 1, B, D)))).any(-1)  # s t B
    lag = np.arange(length)[None, :, None] - np.arange(length)[:, None, None]
    seen = np.broadcast_to((lag >= 0) & (lag <= np.asarray(since)[None] if packed else lag >= 0), change.shape)
    assert not change[~seen].any() and change[seen].mean() > 0.99


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("past", "count"), [(0, 0), (0, 1), (0, 50), (30, 0), (30, 1), (30, 20), (1, 2)])
def test_a_long_convolution_gives_the_outputs_at_its_last_tokens(past, count, packed):
    h, z, since = draw(past + count)
    # before the tokens at hand there is one sequence, with which some rows go on
    index = np.arange(past + count)[:, None]
    fresh = np.random.default_rng(1).random((past + count, B)) < np.array([0.0, 0.1, 0.5])
    fresh &= index >= past
    since = index - np.maximum.accumulate(np.where(fresh, index, 0))
    actual = jax.jit(long_convolution, static_argnums=3)(
        jnp.float32(h), jnp.float32(z), jnp.asarray(since[past:]) if packed else None, count
    )
    assert actual.shape == (count, B, D)
    assert_close(actual, loop(h, z, since if packed else None)[past:], h, z)


N, T = 3, 13
FORMS = [("sequential", 64), ("associative", 64), *(("chunked", chunk) for chunk in (1, 4, 7, 64, T))]


def modes(length, marked):
    """Decays near the unit circle, read-out, state, inputs, and marks: rows of 13, 5 and no tokens."""
    rng = np.random.default_rng(length)
    a = rng.uniform(0.8, 1, (D, N)) * np.exp(1j * rng.uniform(0, 6, (D, N)))
    c, start = (rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in ((D, N), (B, D, N)))
    real = np.arange(length)[:, None] < np.array([T, 5, 0])
    begins = real & (rng.random((length, B)) < 0.3)
    return (a, c, start, rng.normal(size=(length, B, D))), (begins, real) if marked else None


def modal_loop(a, c, start, x, marks):
    h, y = start, np.zeros(x.shape)
    for t in range(len(x)):
        begins, real = (part[t][:, None, None] for part in marks) if marks else (False, True)
        h = np.where(begins, 0, h)
        h = np.where(real, a * h + x[t][..., None], h)
        y[t] = (c * h).sum(-1).real
    return h, y


def pair(x):
    return tuple(jnp.float32(part) for part in (x.real, x.imag)) if np.iscomplexobj(x) else jnp.float32(x)


@pytest.mark.parametrize(("length", "marked"), [(T, False), (T, True), (1, True), (0, True)])
@pytest.mark.parametrize(("scan", "chunk"), FORMS)
def test_modes_are_a_loop_over_complex_numbers(scan, chunk, length, marked):
    arguments, marks = modes(length, marked)
    tokens = np.ones((length, B), bool) if marks is None else marks[1]
    rng = np.random.default_rng(1)
    flow = rng.normal(size=(B, D, N)) + 1j * rng.normal(size=(B, D, N))
    readout = np.where(tokens[..., None], rng.normal(size=(length, B, D)), 0)

    @partial(jax.jit, compiler_options=QUICK)
    def run(*arguments):
        held = None if marks is None else Marks(*map(jnp.asarray, marks))
        result, pull = jax.vjp(lambda *a: modal_recurrence(*a, held, scan=scan, chunk=chunk), *arguments)
        return result, pull((pair(flow), pair(readout)))

    (last, y), gradients = run(*map(pair, arguments))
    expected_last, expected = modal_loop(*arguments, marks)
    # sums of at most 13 terms, the largest some 10, each rounded a few times by 2^-24
    np.testing.assert_allclose(np.asarray(y)[tokens], expected[tokens], atol=2e-5, rtol=0)
    np.testing.assert_allclose(np.float64(last[0]) + 1j * np.float64(last[1]), expected_last, atol=2e-5, rtol=0)

    def value(*arguments):
        last, y = modal_loop(*arguments, marks)
        return (np.conj(flow) * last).sum().real + (readout * y).sum()

    for i, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        direction = rng.normal(size=argument.shape)
        if np.iscomplexobj(argument):
            direction = direction + 1j * rng.normal(size=argument.shape)
            gradient = np.float64(gradient[0]) + 1j * np.float64(gradient[1])
        # a central difference in float64, whose own error is some 1e-9
        sides = [value(*arguments[:i], argument + side * direction, *arguments[i + 1 :]) for side in (1e-5, -1e-5)]
        slope = (sides[0] - sides[1]) / 2e-5
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)  # of the sum before what cancels in it
        assert abs((np.conj(direction) * gradient).sum().real - slope) <= 2e-6 * max(size, 1)


def test_the_chunked_form_is_the_usual_one_and_keeps_no_state_a_token(monkeypatch):
    arguments, _ = modes(64, marked=False)

    def largest(scan):
        program = jax.make_jaxpr(lambda *a: modal_recurrence(*a, None, scan=scan, chunk=16))(*map(pair, arguments))
        return max(v.aval.size for equation in program.eqns for v in equation.outvars)

    assert largest("auto") < 64 * B * D * N == largest("associative")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert largest("auto") < 64 * B * D * N


@pytest.mark.parametrize("length", [T, 1])
def test_an_unknown_scan_and_an_empty_chunk_are_named(length):
    arguments = tuple(map(pair, modes(length, marked=False)[0]))
    with pytest.raises(ValueError, match=r"^scan=fft is unknown; use one of auto, sequential, associative, chunked$"):
        modal_recurrence(*arguments, None, scan="fft")
    with pytest.raises(ValueError, match=r"^chunk=0 must be at least 1$"):
        modal_recurrence(*arguments, None, chunk=0)
