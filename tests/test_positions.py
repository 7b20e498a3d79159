"""Position schemes against their formulas in numpy, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.positions import NoPosition, RoPE, Sinusoidal

POSITIONS = np.array([0, 1, 2, 3, 17, 50, 99, 100])
# an angle is p f, f = base^-x: f is off by 2^-24 f (1 + x ln base) at most, f ln(1/f) <= 1/e, the product rounds again
ATOL = 100 * 4 * 2**-24


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_follow_the_formula(width, base):
    waves = np.array(
        [[(np.cos if d % 2 else np.sin)(p / base ** (2 * (d // 2) / width)) for d in range(width)] for p in POSITIONS]
    )
    x = random(2, len(POSITIONS), width)
    actual = Sinusoidal(base).embed(jnp.float32(x), jnp.asarray(POSITIONS))
    np.testing.assert_allclose(actual, x + waves, atol=ATOL, rtol=0)


def test_a_sinusoid_further_on_is_a_rotation():
    # PE(p + k) = R(k) PE(p): R turns each pair (sin, cos) by k f (Vaswani et al. 2017, section 3.5)
    width, k = 8, 30
    shifted, here = (
        np.asarray(Sinusoidal().embed(jnp.zeros((1, len(p), width)), jnp.asarray(p)))[0]
        for p in (POSITIONS + k, POSITIONS)
    )
    turn = np.exp(1j * k / 10_000 ** (2 * np.arange(width // 2) / width))
    expected = (here[:, 1::2] + 1j * here[:, ::2]) * turn
    np.testing.assert_allclose(shifted[:, 1::2] + 1j * shifted[:, ::2], expected, atol=2 * ATOL, rtol=0)


@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_rope_is_a_complex_product(base):
    width = 6
    x = random(2, len(POSITIONS), 3, width)
    turn = np.exp(1j * POSITIONS[:, None] / base ** (2 * np.arange(width // 2) / width))
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn[:, None, :]
    actual = RoPE(base).rotate(jnp.float32(x), jnp.asarray(POSITIONS))
    # two products of numbers below 4
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=8 * ATOL, rtol=0)


@pytest.mark.parametrize("shift", [1, 100, 10_000])
def test_rope_scores_depend_on_distance_alone(shift):
    q, k = (jnp.asarray(x, jnp.float32) for x in np.split(random(2, len(POSITIONS), 3, 6), 2))
    positions = jnp.asarray(POSITIONS)

    def scores(positions):
        return jnp.einsum("BTHK,BSHK->BHTS", RoPE().rotate(q, positions), RoPE().rotate(k, positions))

    # the angle as above, with p up to 100 + shift; a score is a sum of 6 products of numbers below 4
    atol = 6 * 4 * (100 + shift) * 4 * 2**-24
    np.testing.assert_allclose(scores(positions + shift), scores(positions), atol=atol, rtol=0)
    assert np.abs(scores(2 * positions) - scores(positions)).max() > 0.1


def test_rope_keeps_its_type_but_not_its_rounding():
    x = jnp.asarray(random(1, len(POSITIONS), 2, 4), jnp.bfloat16)
    actual = RoPE().rotate(x, jnp.asarray(POSITIONS))
    assert actual.dtype == jnp.bfloat16
    exact = RoPE().rotate(x.astype(jnp.float32), jnp.asarray(POSITIONS))
    # rounded once, at the end; an angle of 100 in bfloat16 would be off by .25
    assert (actual == exact.astype(jnp.bfloat16)).all()


def test_each_scheme_leaves_the_other_door_alone():
    x, heads, positions = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 2, 2)), jnp.arange(3)
    assert NoPosition().embed(x, positions) is x and NoPosition().rotate(heads, positions) is heads
    assert RoPE().embed(x, positions) is x and Sinusoidal().rotate(heads, positions) is heads


def test_an_odd_rotary_width_is_refused():
    with pytest.raises(ValueError, match=r"model\.width / model\.heads must be even, not 3$"):
        RoPE().rotate(jnp.ones((1, 2, 1, 3)), jnp.arange(2))


def test_positions_of_one_token_a_row_are_those_of_a_sequence():
    # the step form: a row of tokens, each at a position of its own
    heads, x = (jnp.asarray(random(*shape), jnp.float32) for shape in ((len(POSITIONS), 2, 4), (len(POSITIONS), 4)))
    positions = jnp.asarray(POSITIONS)
    np.testing.assert_array_equal(RoPE().rotate(heads, positions), RoPE().rotate(heads[None], positions)[0])
    np.testing.assert_array_equal(Sinusoidal().embed(x, positions), Sinusoidal().embed(x[None], positions)[0])
