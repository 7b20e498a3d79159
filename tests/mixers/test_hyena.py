"""Hyena against loops in float64 written from its formulas, its filters against the laws of their window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.hyena import Filter, Hyena
from seqlab.types import Places

B, T, D = 2, 12, 3
HORIZON = 20

FILTER = 2.5e-4
"""Each sine takes 10 times its argument, and so makes a rounding of some 2^-24 and what came before 10 times larger:
after three of them some 1000 x 4 x 2^-24, of filters whose largest number is about 1."""
ROUNDING = 1e-5
"""Relative L2 between two orders of the same sums, as in the contract test; an FFT over 512 tokens rounds some 20 times
by 2^-24 of their norm, in each of two convolutions."""


def build(order=2, horizon=HORIZON):
    mixer = Hyena(D, order=order, filter_width=8, horizon=horizon, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in (mixer.inputs.bias, mixer.short.bias, mixer.out.bias, mixer.filter.hidden[0].bias):
        param[...] = 0.5 * jax.random.normal(keys(), param.shape)
    return mixer


@nnx.jit
def mix(mixer, x, places=None):
    return mixer(x, places)


def draw(length=T, seed=0):
    return np.random.default_rng(seed).normal(size=(B, length, D)).astype(np.float32)


def plain(mixer):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(mixer)))


def filters(p, length, order, horizon=HORIZON, bands=8):
    """[order, L, D] of a width D."""
    width, result = p["out"]["kernel"].shape[1] // order, []
    for lag in range(length):
        time = lag / horizon
        angles = 2 * np.pi * time * np.linspace(1e-4, bands - 1, bands)
        z = np.concatenate([[time], np.cos(angles), np.sin(angles)])
        for i in range(3):
            z = np.sin(p["frequency"] * (z @ p["hidden"][i]["kernel"] + p["hidden"][i]["bias"]))
        rates = np.log(100) * np.linspace(1 / 1.5, 1 / 0.3, width)
        window = np.sqrt(1 - np.exp(-2 * rates / horizon)) * np.exp(-rates * time)
        result.append((z @ p["out"]["kernel"]).reshape(order, width) * window)
    return np.array(result).reshape(length, order, width).swapaxes(0, 1)


def loop(p, x):
    """One sequence [T, D]."""
    order = len(p["bias"])
    projected = x @ p["inputs"]["kernel"] + p["inputs"]["bias"]
    short = np.zeros(projected.shape) + p["short"]["bias"]
    for t in range(len(x)):
        for lag in range(min(t + 1, 3)):
            short[t] += p["short"]["kernel"][2 - lag] * projected[t - lag]
    z, *gates = np.split(short, order + 1, axis=-1)
    for gate, h, bias in zip(gates, filters(p["filter"], len(x), order), p["bias"], strict=True):
        convolved = [sum(h[lag] * z[t - lag] for lag in range(t + 1)) for t in range(len(z))]
        z = gate * (np.array(convolved) + bias * z)
    return z @ p["out"]["kernel"] + p["out"]["bias"]


def distance(y, reference):
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_filters_are_those_of_the_formula(order):
    mixer = build(order)
    actual = jax.jit(mixer.filter)(jnp.arange(3 * HORIZON))
    np.testing.assert_allclose(actual, filters(plain(mixer.filter), 3 * HORIZON, order), atol=FILTER, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_outputs_are_those_of_the_formula(order, packed):
    mixer, x = build(order), draw()
    segments = np.array([[1] * 4 + [2] * 5 + [3] * 3, [1] * 7 + [2] * 2 + [0] * 3])
    y = np.asarray(mix(mixer, jnp.asarray(x), Places.of(jnp.asarray(segments)) if packed else None))
    if not packed:
        segments = np.ones((B, T), int)
    for row in range(B):
        for segment in set(segments[row]) - {0}:
            here = segments[row] == segment
            expected = loop(plain(mixer), x[row, here])
            # the filter's error in each of `order` convolutions, of outputs of size 1
            np.testing.assert_allclose(y[row, here], expected, atol=order * FILTER, rtol=0)


def test_gradients_are_those_of_the_formula():
    mixer, x, readout = build(), np.float64(draw(6)), np.float64(draw(6, seed=1))
    graph, params = nnx.split(mixer)

    @jax.jit
    def gradients(params, x):
        return jax.grad(lambda params, x: (nnx.merge(graph, params)(x) * jnp.float32(readout)).sum(), (0, 1))(params, x)

    by_param, by_x = gradients(params, jnp.float32(x))
    leaves, tree = jax.tree.flatten((plain(mixer), x))

    def value(leaves):
        p, x = jax.tree.unflatten(tree, leaves)
        return sum((loop(p, row) * out).sum() for row, out in zip(x, readout, strict=True))

    rng = np.random.default_rng(2)
    for i, gradient in enumerate(map(np.float64, jax.tree.leaves((by_param, by_x)))):
        direction = rng.normal(size=leaves[i].shape)
        step = 1e-6  # a central difference in float64, whose own error is some 1e-7 after three sines of 10 times z
        sides = [value([*leaves[:i], leaves[i] + side * direction, *leaves[i + 1 :]]) for side in (step, -step)]
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)  # of the sum before what cancels in it
        # the roundings of the filter, which the derivative of a sine of 10 times z makes 10 times larger
        assert abs((gradient * direction).sum() - (sides[0] - sides[1]) / (2 * step)) <= 10 * FILTER * max(size, 1)


def test_a_filter_depends_on_the_lag_alone():
    mixer = build()
    few, many = (np.asarray(mixer.filter(jnp.arange(length))) for length in (5, 100))
    np.testing.assert_allclose(few, many[:, :5], atol=FILTER, rtol=0)
    turned = np.asarray(mixer.filter(jnp.arange(100)[::-1]))
    np.testing.assert_allclose(turned[:, ::-1], many, atol=FILTER, rtol=0)


@pytest.mark.parametrize("horizon", [10, 1000])
def test_the_window_of_a_filter_keeps_the_power_of_noise_whatever_its_horizon(horizon):
    filter = Filter(4, order=1, hidden=8, horizon=horizon, rngs=nnx.Rngs(0))
    # a network that is 1 at all lags: one unit at the top of its sine
    filter.hidden[-1].kernel[...] = jnp.zeros((8, 8))
    filter.hidden[-1].bias[...] = jnp.full(8, np.pi / 20)
    filter.out.kernel[...] = jnp.zeros((8, 4)).at[0].set(1.0)
    window = np.float64(filter(jnp.arange(3 * horizon)))[0]
    # beyond three horizons is left the square of what has fallen to 1% twice
    np.testing.assert_allclose((window**2).sum(0), 1, atol=1e-5)
    # 1% of the start after 1.5 horizons in the slowest channel, after .3 in the fastest
    slow, fast = window[3 * horizon // 2, 0] / window[0, 0], window[3 * horizon // 10, -1] / window[0, -1]
    np.testing.assert_allclose([slow, fast], 0.01, rtol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 2, 150, 299, 300])
def test_it_goes_on_from_where_it_stopped(cut):
    length, mixer, x = 300, build(horizon=200), jnp.asarray(draw(300))
    whole = mix(mixer, x)

    @nnx.jit
    def in_two(mixer, x):
        state, before = mixer.prefill(mixer.init_state(B, length), x[:, :cut])
        state, after = mixer.prefill(state, x[:, cut:])
        return state, jnp.concatenate([before, after], axis=1)

    state, y = in_two(mixer, x)
    assert distance(y, whole) <= ROUNDING
    at_once, _ = mixer.prefill(mixer.init_state(B, length), x)
    for part, expected in zip(jax.tree.leaves(state), jax.tree.leaves(at_once), strict=True):
        assert part.shape == expected.shape and distance(part, expected) <= ROUNDING
    assert [cache.shape for cache in state["long"]] == [(B, length, D)] * 2


def test_token_by_token_gives_the_outputs_of_the_sequence():
    length, mixer, x = 300, build(horizon=200), jnp.asarray(draw(300))

    @nnx.jit
    def walk(mixer, x):
        return jax.lax.scan(mixer.step, mixer.init_state(B, length), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    assert distance(walk(mixer, x), mix(mixer, x)) <= ROUNDING


def test_packed_sequences_are_as_alone_and_the_last_one_goes_on():
    mixer, x = build(horizon=200), jnp.asarray(draw(300))
    segments = np.array([[1] * 60 + [2] * 240, [1] * 200 + [2] * 70 + [0] * 30])

    @nnx.jit
    def continued(mixer, x, places):
        state, _ = mixer.prefill(mixer.init_state(B, 400), x[:, :50])
        state, y = mixer.prefill(state, x, places)
        return y, mixer.step(state, x[:, 0])[1]

    y, next_y = continued(mixer, x, Places.of(jnp.asarray(segments)))
    for row, (first, last) in enumerate(((60, 300), (200, 270))):
        begun = jnp.concatenate([x[row : row + 1, :50], x[row : row + 1, :first]], axis=1)
        assert distance(y[row, :first], mix(mixer, begun)[0, 50:]) <= ROUNDING
        alone = jnp.concatenate([x[row : row + 1, first:last], x[row : row + 1, :1]], axis=1)
        together = mix(mixer, alone)[0]
        assert distance(y[row, first:last], together[:-1]) <= ROUNDING
        assert distance(next_y[row], together[-1]) <= ROUNDING


@pytest.mark.parametrize("packed", [False, True])
def test_the_future_is_not_seen_not_even_in_rounding(packed):
    mixer, x = build(horizon=200), draw(300)
    other = np.where(np.arange(300)[None, :, None] < 150, x, 100 * draw(300, seed=1))
    places = Places.of(jnp.ones((B, 300), jnp.int32)) if packed else None
    y, changed = (np.asarray(mix(mixer, jnp.asarray(part), places)) for part in (x, other))
    assert (y[:, :150] == changed[:, :150]).all() and (y[:, 150:] != changed[:, 150:]).all()


def test_filters_and_state_are_in_float32_when_all_else_is_in_bfloat16():
    mixer, x = build(), jnp.asarray(draw())
    reference = mix(mixer, x)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(mixer))
    nnx.update(mixer, low)
    state, y = mixer.prefill(mixer.init_state(B, T), x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and {cache.dtype for cache in state["long"]} == {jnp.dtype(jnp.float32)}
    assert mixer.filter(jnp.arange(3)).dtype == jnp.float32
    # parameters are rounded by 2^-9, and those of the filter meet three sines of 10 times their argument
    assert distance(y.astype(jnp.float32), reference) < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0}, "a Hyena needs order of 1 or more, not order=0"),
        ({"filter_width": 0}, "a Hyena needs filter_width of 1 or more, not filter_width=0"),
        ({"horizon": 0.5}, "a Hyena needs horizon of 1 or more, not horizon=0.5"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=rf"^{message}$"):
        Hyena(D, **options, rngs=nnx.Rngs(0))


def test_more_tokens_than_the_cache_holds_are_refused():
    mixer = build()
    with pytest.raises(
        ValueError, match=r"^12 tokens do not fit the cache of 11; use init_state\(batch, max_length=12\)$"
    ):
        mixer.prefill(mixer.init_state(B, T - 1), jnp.asarray(draw()))
    mixer.prefill(mixer.init_state(B, T), jnp.asarray(draw()))
