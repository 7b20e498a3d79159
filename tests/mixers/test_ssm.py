"""The LRU against a numpy loop over complex numbers, and its start against the laws of its ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.mixers.base import Recurrence
from seqlab.mixers.ssm import LRU

B, T, D, N = 2, 11, 4, 6
RING = {"r_min": 0.4, "r_max": 0.95, "max_phase": 2.0}


def numbers(param):
    return np.asarray(param[...], np.float64)


def eigenvalues(mixer):
    return np.exp(-np.exp(numbers(mixer.nu)) + 1j * np.exp(numbers(mixer.theta)))


@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_it_is_a_loop_over_complex_numbers(scan):
    mixer = LRU(D, state_size=N, scan=scan, **RING, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in (mixer.gamma, mixer.gate.bias, mixer.out.bias):  # away from what they start as
        param[...] += 0.5 * jax.random.normal(keys(), param.shape)
    x = np.random.default_rng(0).normal(size=(B, T, D))
    decay, gamma = eigenvalues(mixer), np.exp(numbers(mixer.gamma))
    b, c = (numbers(re) + 1j * numbers(im) for re, im in ((mixer.b_re, mixer.b_im), (mixer.c_re, mixer.c_im)))
    expected = np.zeros((B, T, D))
    for row in range(B):
        h = np.zeros(N, complex)
        for t in range(T):
            h = decay * h + gamma * (x[row, t] @ b)
            y = (h @ c).real + numbers(mixer.d) * x[row, t]
            gate = x[row, t] @ numbers(mixer.gate.kernel) + numbers(mixer.gate.bias)
            gated = y * gate / (1 + np.exp(-gate))
            expected[row, t] = gated @ numbers(mixer.out.kernel) + numbers(mixer.out.bias)
    # eleven steps, sums of at most 12 products of numbers of a few units: some 200 roundings of 2^-24
    np.testing.assert_allclose(jax.jit(mixer)(jnp.float32(x)), expected, atol=5e-5, rtol=0)


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


def test_what_acts_on_the_state_is_a_recurrence():
    mixer = LRU(D, state_size=N, rngs=nnx.Rngs(0))
    assert all(isinstance(param, Recurrence) for param in (mixer.nu, mixer.theta, mixer.gamma))
    assert not any(isinstance(param, Recurrence) for param in (mixer.b_re, mixer.c_im, mixer.d, mixer.out.kernel))


@pytest.mark.parametrize(("r_min", "r_max"), [(0.9, 0.5), (0.5, 0.5), (0.0, 1.0), (-0.1, 0.9)])
def test_a_ring_that_is_none_is_refused(r_min, r_max):
    message = rf"^an LRU needs 0 <= r_min < r_max < 1, not r_min={r_min}, r_max={r_max}$"
    with pytest.raises(ValueError, match=message):
        LRU(D, state_size=N, r_min=r_min, r_max=r_max, rngs=nnx.Rngs(0))
