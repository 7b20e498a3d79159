"""State-space models against numpy loops over complex numbers, SciPy's discretisation and dense matrices; their starts
against the laws they are drawn from.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import linalg, signal, stats

from seqlab.mixers.base import Recurrence
from seqlab.mixers.ssm import LRU, S4D, S5, bilinear, normal_hippo, zero_order_hold

B, T, D, N = 2, 11, 4, 6
RING = {"r_min": 0.4, "r_max": 0.95, "max_phase": 2.0}
FORMS = [("sequential", 64), ("chunked", 4)]  # how all of them agree is a law of the contract test
# to compile is most of what takes time here
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def numbers(param):
    return np.asarray(param[...], np.float64)


def eigenvalues(mixer):
    return np.exp(-np.exp(numbers(mixer.nu)) + 1j * np.exp(numbers(mixer.theta)))


DISCRETE = {  # of a mode a over a step, in the words of MEASURES.md
    "zoh": lambda a, step: (np.exp(step * a), np.expm1(step * a) / a),
    "bilinear": lambda a, step: ((1 + step * a / 2) / (1 - step * a / 2), step / (1 - step * a / 2)),
}


def lru_system(p):
    decay = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))
    return decay, np.exp(p["gamma"]), p["b_re"] + 1j * p["b_im"], p["c_re"] + 1j * p["c_im"]


def s5_system(p, discretization):
    a = -np.exp(p["modes"]["log_decay"]) + 1j * p["modes"]["frequency"]
    decay, scale = DISCRETE[discretization](a, np.exp(p["modes"]["log_step"]))
    return decay, scale, p["b_re"] + 1j * p["b_im"], 2 * (p["c_re"] + 1j * p["c_im"])


def shared(system, p, x):
    """One state that all channels drive: y [D] of each token of a row [T, D]."""
    decay, scale, b, c = system(p)
    h = np.zeros(len(decay), complex)
    for x_t in x:
        h = decay * h + scale * (x_t @ b)
        yield (h @ c).real


def s4d(discretization, p, x):
    """A state for each channel."""
    for t in range(len(x)):
        y = np.zeros(x.shape[1])
        for channel, c in enumerate(p["c_re"] + 1j * p["c_im"]):
            a = -np.exp(p["modes"]["log_decay"][channel]) + 1j * p["modes"]["frequency"][channel]
            decay, scale = DISCRETE[discretization](a, np.exp(p["modes"]["log_step"][channel]))
            # the convolution that the recurrence is
            h = sum(decay**lag * scale * x[t - lag, channel] for lag in range(t + 1))
            y[channel] = 2 * (c * h).real.sum()
        yield y


MODELS = {
    "lru": (partial(LRU, state_size=N, **RING), partial(shared, lru_system)),
    "s4d": (partial(S4D, state_size=N), partial(s4d, "zoh")),
    "s4d_inv_bilinear": (partial(S4D, state_size=N, init="inv", discretization="bilinear"), partial(s4d, "bilinear")),
    "s5": (partial(S5, state_size=N), partial(shared, partial(s5_system, discretization="zoh"))),
    "s5_blocks_bilinear": (
        partial(S5, state_size=8, blocks=2, discretization="bilinear"),
        partial(shared, partial(s5_system, discretization="bilinear")),
    ),
}


def build(name, **options):
    """Away from what it starts as, so that nothing is zero or equal; steps long enough to matter in 11 tokens."""
    mixer = MODELS[name][0](D, **options, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] += 0.2 * jax.random.normal(keys(), param.shape)
    if name != "lru":
        mixer.modes.log_step[...] += 2.0
    return mixer


def plain(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))


def outputs(name, p, x):
    """[B, T, D], in float64 and complex128."""
    y = np.array([list(MODELS[name][1](p, row)) for row in x]) + p["d"] * x
    gate = x @ p["gate"]["kernel"] + p["gate"]["bias"]
    return y * gate / (1 + np.exp(-gate)) @ p["out"]["kernel"] + p["out"]["bias"]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_a_loop_over_complex_numbers(name):
    mixer = build(name)
    graph, params = nnx.split(mixer)
    rng = np.random.default_rng(0)
    x, readout = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, D))
    p = plain(params)
    expected = outputs(name, p, x)
    # eleven steps, sums of at most 12 products of numbers of a few units: some 200 roundings of 2^-24
    atol = 5e-5
    found = []
    for scan, chunk in FORMS:
        graph = nnx.graphdef(build(name, scan=scan, chunk=chunk))

        @partial(jax.jit, compiler_options=QUICK)
        def with_gradients(params, x, readout, graph=graph):
            y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
            return y, *pull(readout)

        y, by_param, by_x = with_gradients(params, jnp.float32(x), jnp.float32(readout))
        np.testing.assert_allclose(y, expected, atol=atol * np.abs(expected).max(), rtol=0)
        found.append((plain(by_param), np.float64(by_x)))

    def slope(change, x_change):
        """Central difference in float64: its own error is some 1e-10."""
        step = 1e-5
        moved = [
            outputs(name, jax.tree.map(lambda a, b, side=side: a + side * b, p, change), x + side * x_change)
            for side in (step, -step)
        ]
        return (readout * (moved[0] - moved[1])).sum() / (2 * step)

    leaves, tree = jax.tree.flatten(p)
    zeros = [np.zeros_like(leaf) for leaf in leaves]
    for i, leaf in enumerate(leaves):
        direction = rng.normal(size=leaf.shape)
        reference = slope(jax.tree.unflatten(tree, [*zeros[:i], direction, *zeros[i + 1 :]]), 0.0)
        for by_param, _ in found:
            gradient = jax.tree.leaves(by_param)[i]
            size = np.linalg.norm(gradient) * np.linalg.norm(direction)  # of the sum before what cancels in it
            assert abs((gradient * direction).sum() - reference) <= atol * max(size, 1)
    direction = rng.normal(size=x.shape)
    reference = slope(jax.tree.unflatten(tree, zeros), direction)
    for _, by_x in found:
        assert abs((by_x * direction).sum() - reference) <= atol * np.linalg.norm(by_x) * np.linalg.norm(direction)


@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_in_float32_and_so_is_what_acts_on_it(name):
    mixer = build(name)
    size = {"lru": (N,), "s4d": (D, N // 2), "s5": (N // 2,)}[name.split("_")[0]] if "blocks" not in name else (4,)
    state = mixer.init_state(3, 99)
    assert [(part.shape, part.dtype) for part in state] == [((3, *size), jnp.float32)] * 2
    low = jax.tree.map(
        lambda param: param if isinstance(param, Recurrence) else param.replace(param[...].astype(jnp.bfloat16)),
        nnx.state(mixer),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    nnx.update(mixer, low)
    state, y = mixer.prefill(mixer.init_state(B, T), jnp.ones((B, T, D), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and {part.dtype for part in state} == {jnp.dtype(jnp.float32)}


@pytest.fixture(scope="module")
def wide():
    """Its 8192 numbers are as many draws."""
    return LRU(2, state_size=8192, **RING, rngs=nnx.Rngs(0))


def test_eigenvalues_are_uniform_in_area_on_the_ring(wide):
    decay = eigenvalues(wide)
    low, high = RING["r_min"], RING["r_max"]
    assert (np.abs(decay) >= low - 1e-6).all() and (np.abs(decay) <= high + 1e-6).all()  # rounding
    # one fixed seed; uniform in area is uniform in |l|^2; a right start fails each level with probability 1e-4
    area = stats.uniform(low**2, high**2 - low**2)
    assert stats.kstest(np.abs(decay) ** 2, area.cdf).pvalue > 1e-4
    phase = np.exp(numbers(wide.theta))
    assert stats.kstest(phase, stats.uniform(0, RING["max_phase"]).cdf).pvalue > 1e-4
    assert stats.spearmanr(np.abs(decay), phase).pvalue > 1e-4


def test_another_seed_is_another_draw(wide):
    assert not np.allclose(eigenvalues(LRU(2, state_size=8192, **RING, rngs=nnx.Rngs(1))), eigenvalues(wide))


def test_gamma_makes_up_for_what_the_decay_accumulates(wide):
    # nu is rounded once as a logarithm below 3 and once as a number, and 1 - |l|^2 is no steeper than it: 4 x 2^-24
    np.testing.assert_allclose(np.exp(numbers(wide.gamma)), np.sqrt(1 - np.abs(eigenvalues(wide)) ** 2), rtol=1e-6)


def test_a_ring_forgets_as_theory_says(wide):
    # E |l|^2k g^2 = F_k - F_k+1 with F_k = (r1^(2k+2) - r0^(2k+2)) / ((k+1) (r1^2 - r0^2)): the integral over the area
    low, high = RING["r_min"], RING["r_max"]

    def f(k):
        return (high ** (2 * k + 2) - low ** (2 * k + 2)) / ((k + 1) * (high**2 - low**2))

    for k in (0, 1, 4, 16):
        seen = np.abs(eigenvalues(wide)) ** (2 * k) * np.exp(2 * numbers(wide.gamma))
        # a mean of 8192 draws: 4 standard errors
        assert abs(seen.mean() - (f(k) - f(k + 1))) < 4 * seen.std() / np.sqrt(len(seen))


def test_projections_start_with_the_variance_of_the_recipe():
    mixer = LRU(128, state_size=64, rngs=nnx.Rngs(0))
    for param, variance in ((mixer.b_re, 1 / 256), (mixer.b_im, 1 / 256), (mixer.c_re, 1 / 64), (mixer.c_im, 1 / 64)):
        # 8192 draws: the variance of the sample is within 5 standard errors of sqrt(2 / 8192)
        assert abs(numbers(param).var() / variance - 1) < 5 * np.sqrt(2 / 8192)


def test_a_whole_disk_starts_stable():
    mixer = LRU(2, state_size=8192, r_min=0.0, r_max=0.999, rngs=nnx.Rngs(0))
    decay = np.abs(eigenvalues(mixer))
    assert np.isfinite(numbers(mixer.nu)).all() and (decay < 1).all() and decay.max() > 0.99


@pytest.mark.parametrize("name", MODELS)
def test_what_acts_on_the_state_is_a_recurrence(name):
    mixer = build(name)
    acting = (
        (mixer.nu, mixer.theta, mixer.gamma)
        if name == "lru"
        else jax.tree.leaves(nnx.state(mixer.modes), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )
    assert len(acting) == 3 and all(isinstance(param, Recurrence) for param in acting)
    assert not any(isinstance(param, Recurrence) for param in (mixer.c_re, mixer.c_im, mixer.d, mixer.out.kernel))


@pytest.mark.parametrize(("r_min", "r_max"), [(0.9, 0.5), (0.5, 0.5), (0.0, 1.0), (-0.1, 0.9)])
def test_a_ring_that_is_none_is_refused(r_min, r_max):
    message = rf"^an LRU needs 0 <= r_min < r_max < 1, not r_min={r_min}, r_max={r_max}$"
    with pytest.raises(ValueError, match=message):
        LRU(D, state_size=N, r_min=r_min, r_max=r_max, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("method", "discretise"), [("zoh", zero_order_hold), ("bilinear", bilinear)])
def test_a_mode_is_sampled_as_scipy_samples_it(method, discretise):
    for real, imaginary in ((-0.5, 0.0), (-0.5, 100.0), (-3.0, -2.0)):
        for step in (1e-5, 1e-3, 0.1, 1.0):
            # the mode as a real system of two, driven along its real part
            a = np.array([[real, -imaginary], [imaginary, real]])
            decay, scale, *_ = signal.cont2discrete((a, np.array([[1.0], [0.0]]), np.eye(2), 0.0), step, method=method)
            mode = tuple(jnp.float32([part]) for part in (real, imaginary))
            actual = [np.array([part[0] for part in pair]) for pair in discretise(mode, jnp.float32([step]))]
            # an angle of up to 100 is rounded by 100 x 2^-24, all else a few times by 2^-24
            np.testing.assert_allclose(actual[0], decay[:, 0], atol=1e-5, rtol=0)
            np.testing.assert_allclose(actual[1], scale[:, 0], atol=1e-5 * np.abs(scale).max(), rtol=0)


@pytest.mark.parametrize(
    ("init", "n", "expected"), [("lin", 3, 3 * np.pi), ("inv", 0, 56 / np.pi), ("inv", 3, 8 / 7 / np.pi)]
)
def test_s4d_starts_as_its_recipe_says(init, n, expected):
    modes = S4D(3, state_size=8, init=init, rngs=nnx.Rngs(0)).modes
    assert modes.frequency.shape == (3, 4)
    np.testing.assert_allclose(numbers(modes.frequency)[:, n], expected, rtol=1e-6)  # two roundings of 2^-24
    np.testing.assert_allclose(-np.exp(numbers(modes.log_decay)), -0.5, rtol=1e-6)


@pytest.mark.parametrize("mixer", [partial(S4D, 4096, state_size=2), partial(S5, 2, state_size=8192, blocks=1024)])
def test_steps_start_uniform_in_their_logarithm(mixer):
    steps = numbers(mixer(rngs=nnx.Rngs(0)).modes.log_step).ravel()
    assert len(steps) == 4096  # one for each channel of an S4D, and for each mode of an S5
    # one fixed seed; a right start fails this level with probability 1e-4
    assert stats.kstest(steps, stats.uniform(np.log(1e-3), np.log(100)).cdf).pvalue > 1e-4


def test_s4d_reads_its_modes_with_complex_numbers_of_variance_1():
    mixer = S4D(128, state_size=128, rngs=nnx.Rngs(0))
    for param in (mixer.c_re, mixer.c_im):
        # 8192 draws: the variance of the sample is within 5 standard errors of sqrt(2 / 8192)
        assert abs(numbers(param).var() / 0.5 - 1) < 5 * np.sqrt(2 / 8192)


def hippo(size):
    """HiPPO-LegS plus the rank-1 matrix that makes it normal (Gu et al. 2022, eq. 2 and sec. 2.2), entry by entry."""
    a = np.zeros((size, size))
    for n in range(size):
        for k in range(size):
            a[n, k] = -np.sqrt((2 * n + 1) * (2 * k + 1)) if n > k else -(n + 1) if n == k else 0
            a[n, k] += np.sqrt(n + 0.5) * np.sqrt(k + 0.5)
    return a


@pytest.mark.parametrize("size", [2, 6, 64])
def test_modes_are_those_of_the_normal_part_of_hippo(size):
    values, vectors = normal_hippo(size)
    s = hippo(size)
    # float64: size roundings of 2^-53 of entries up to the size
    atol = 1e-14 * size**2
    np.testing.assert_allclose(s @ vectors, values * vectors, atol=atol)
    np.testing.assert_allclose(vectors.conj().T @ vectors, np.eye(size // 2), atol=atol)
    everything = np.linalg.eigvals(s)
    above = np.sort(everything[everything.imag > 0].imag)
    assert (values.imag > 0).all() and len(above) == size // 2
    np.testing.assert_allclose(values, -0.5 + 1j * above, atol=atol)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_s5_starts_as_a_real_system_with_the_normal_part_of_hippo(discretization, blocks):
    size, step = 12, 0.3
    mixer = S5(D, state_size=size, blocks=blocks, discretization=discretization, rngs=nnx.Rngs(0))
    mixer.modes.log_step[...] = jnp.full(size // 2, np.log(step))
    vectors = linalg.block_diag(*[normal_hippo(size // blocks)[1]] * blocks)
    dense = linalg.block_diag(*[hippo(size // blocks)] * blocks)
    b = 2 * (vectors @ (numbers(mixer.b_re) + 1j * numbers(mixer.b_im)).T).real  # N D
    c = 2 * ((numbers(mixer.c_re) + 1j * numbers(mixer.c_im)).T @ vectors.conj().T).real  # D N
    decay, scale, *_ = signal.cont2discrete((dense, b, c, np.zeros((D, D))), step, method=discretization)
    x = np.random.default_rng(0).normal(size=(B, T, D))
    p = plain(nnx.state(mixer))
    expected = np.zeros((B, T, D))
    for row in range(B):
        h = np.zeros(size)
        for t in range(T):
            h = decay @ h + scale @ x[row, t]
            gate = x[row, t] @ p["gate"]["kernel"] + p["gate"]["bias"]
            y = (c @ h + p["d"] * x[row, t]) * gate / (1 + np.exp(-gate))
            expected[row, t] = y @ p["out"]["kernel"] + p["out"]["bias"]
    # eleven steps, sums of at most 12 products of numbers of a few units: some 200 roundings of 2^-24
    np.testing.assert_allclose(jax.jit(mixer)(jnp.float32(x)), expected, atol=5e-5, rtol=0)


def test_s5_draws_real_matrices_with_the_variance_of_the_recipe():
    mixer = S5(128, state_size=64, rngs=nnx.Rngs(0))
    vectors = normal_hippo(64)[1]
    b = 2 * (vectors @ (numbers(mixer.b_re) + 1j * numbers(mixer.b_im)).T).real
    c = 2 * ((numbers(mixer.c_re) + 1j * numbers(mixer.c_im)).T @ vectors.conj().T).real
    for real, variance in ((b, 1 / 128), (c, 1 / 64)):
        # 8192 draws: the variance of the sample is within 5 standard errors of sqrt(2 / 8192)
        assert abs(real.var() / variance - 1) < 5 * np.sqrt(2 / 8192)
        assert stats.kstest(real.ravel(), stats.norm(0, variance**0.5).cdf).pvalue > 1e-4


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (partial(S4D, state_size=5), "an S4D has pairs of modes, and state_size=5 is odd or below 2"),
        (partial(S4D, state_size=0), "an S4D has pairs of modes, and state_size=0 is odd or below 2"),
        (partial(S4D, state_size=N, init="legs"), "init=legs is unknown; use one of lin, inv"),
        (
            partial(S4D, state_size=N, discretization="euler"),
            "discretization=euler is unknown; use one of zoh, bilinear",
        ),
        (
            partial(S5, state_size=N, discretization="euler"),
            "discretization=euler is unknown; use one of zoh, bilinear",
        ),
        (partial(S5, state_size=6, blocks=4), "state_size=6 cannot be split into blocks=4"),
        (partial(S5, state_size=6, blocks=0), "state_size=6 cannot be split into blocks=0"),
        (
            partial(S5, state_size=6, blocks=2),
            "each block of an S5 has pairs of modes, and state_size=3 is odd or below 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(mixer, message):
    with pytest.raises(ValueError, match=rf"^{message}$"):
        mixer(D, rngs=nnx.Rngs(0))
