"""Each mixer by itself: its forms agree, extreme inputs and long sequences stay finite, bfloat16 costs its rounding."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import MIXERS, SCANNED, STEPPED
from flax import nnx

from seqlab.model import compute_in
from seqlab.types import Places

B, T, D = 2, 16, 8
SEGMENTS = jnp.array([[1] * 5 + [2] * 9 + [0] * 2, [1] * 16])
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: most of the time here goes into compiling."""

ROUNDING = 1e-5
"""Relative L2, as in the contract: a hundred roundings of 2^-24."""


def build(name, **settings):
    return MIXERS[name](D, rngs=nnx.Rngs(0), **settings)


def outputs(mixer):
    graph, params = nnx.split(mixer)
    return jax.jit(lambda p, x: nnx.merge(graph, p)(x, Places.of(SEGMENTS)), compiler_options=QUICK), params


def gradients(mixer):
    """Compiled: the outputs, and the gradients of a random read-out by the parameters and the inputs."""
    graph, params = nnx.split(mixer)

    def both(params, x, segments):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, Places.of(segments)), params, x)
        read = jnp.where(segments[..., None] > 0, jax.random.normal(jax.random.key(1), y.shape, y.dtype), 0.0)
        return y, pull(read)  # what comes out at padding is nobody's

    return jax.jit(both, compiler_options=QUICK), params


plain = cache(lambda name: gradients(build(name, **({"scan": "sequential"} if name in SCANNED else {}))))


def draw(shape=(B, T, D)):
    return jax.random.normal(jax.random.key(2), shape)


def distance(y, reference):
    y, reference = (np.asarray(a, np.float64) for a in (y, reference))
    return np.linalg.norm(y - reference) / max(np.linalg.norm(reference), 1e-30)


@pytest.mark.slow
@pytest.mark.parametrize("form", [("associative", 64), ("chunked", 7)], ids=str)
@pytest.mark.parametrize("name", SCANNED)
def test_every_form_gives_the_outputs_and_gradients_of_the_step_by_step_one(name, form):
    (reference, params), (other, same) = plain(name), gradients(build(name, scan=form[0], chunk=form[1]))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), params, same)))
    (y, (by_params, by_x)), (z, (by_params_2, by_x_2)) = (f(params, draw(), SEGMENTS) for f in (reference, other))
    real = SEGMENTS > 0
    assert distance(z[real], y[real]) <= ROUNDING
    assert distance(by_x_2, by_x) <= ROUNDING
    whole = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(by_params)))
    for leaf, expected in zip(jax.tree.leaves(by_params_2), jax.tree.leaves(by_params), strict=True):
        # a gradient that cancels to a small share of the whole keeps the roundings of its terms
        assert np.linalg.norm(leaf - expected) <= ROUNDING * max(np.linalg.norm(expected), 0.1 * whole)


@pytest.mark.parametrize("chunk", [1, 64, T])
@pytest.mark.parametrize("name", SCANNED)
def test_chunks_of_any_size_give_the_same(name, chunk):
    (reference, params), (chunked, _) = plain(name), outputs(build(name, scan="chunked", chunk=chunk))
    real = SEGMENTS > 0
    assert distance(chunked(params, draw())[real], reference(params, draw(), SEGMENTS)[0][real]) <= ROUNDING


@pytest.mark.parametrize("name", MIXERS)
def test_extreme_inputs_stay_finite(name):
    run, params = plain(name)
    for scale in (1e4, 1e-40, 0.0):  # 1e-40 is a denormal number in float32
        for leaf in jax.tree.leaves(run(params, scale * draw(), SEGMENTS)):
            assert jnp.isfinite(leaf).all(), scale
    for leaf in jax.tree.leaves(run(params, draw(), jnp.zeros_like(SEGMENTS))):
        assert jnp.isfinite(leaf).all()


BF16 = 0.03
"""Relative L2. Some 20 roundings of 2^-9 one after another, each of its own sign: sqrt(20) 2^-9 = .009, times three."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_a_pass_in_bfloat16_costs_its_roundings(name):
    mixer = build(name)
    graph, params = nnx.split(mixer)
    low = compute_in(jnp.dtype(jnp.bfloat16), params)
    x = draw((B, T, D))

    def whole(params, x):
        return nnx.merge(graph, params)(x)

    def walk(params, x):
        mixer = nnx.merge(graph, params)
        return jax.lax.scan(mixer.step, mixer.init_state(B, T), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix types
        exact, rounded = whole(params, x), jax.jit(whole, compiler_options=QUICK)(low, x.astype(jnp.bfloat16))
        assert rounded.dtype == jnp.bfloat16
        assert distance(rounded, exact) <= BF16
        if mixer.causal:
            stepped = jax.jit(walk, compiler_options=QUICK)(low, x.astype(jnp.bfloat16))
            assert stepped.dtype == jnp.bfloat16
            assert distance(stepped, rounded) <= BF16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCANNED | STEPPED)
def test_recurrences_of_65536_tokens_stay_finite(name, dtype):
    graph, params = nnx.split(build(name))

    @jax.jit
    def both(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, compute_in(jnp.dtype(dtype), params))(x), params, x)
        return y, pull(jax.random.normal(jax.random.key(1), y.shape, y.dtype))

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix types
        result = both(params, draw((1, 65_536, D)).astype(dtype))
    for leaf in jax.tree.leaves(result):
        assert jnp.isfinite(leaf).all()
