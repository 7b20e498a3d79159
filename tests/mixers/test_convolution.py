"""The short convolution against a loop over tokens and against PyTorch, and any mixer behind it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.convolution import Convolved, ShortConvolution
from seqlab.mixers.rnn import GRU
from seqlab.types import Places

B, T, D = 4, 9, 3
# a sum of at most 5 products of numbers of a few units: some 10 roundings of 2^-24, of numbers below 10
ATOL = 1e-5
PACKED = np.array(
    [[1, 1, 1, 2, 2, 2, 2, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 2, 2, 7, 7, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0]]
)
"""Sequences in runs, padding behind them; one row of one sequence, one of nothing."""


def build(size=4, **options):
    mixer = ShortConvolution(D, size=size, **options, rngs=nnx.Rngs(0))
    if mixer.bias is not None:
        mixer.bias[...] = jnp.arange(1.0, D + 1)
    return mixer


def draw(length=T):
    return np.random.default_rng(0).normal(size=(B, length, D)).astype(np.float32)


def loop(mixer, x, segments=None):
    """Each output from the tokens of its own sequence, one product at a time."""
    kernel = np.float64(mixer.kernel[...])
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            y[row, t] = 0 if mixer.bias is None else np.float64(mixer.bias[...])
            for lag in range(min(t + 1, len(kernel))):
                if segments is None or segments[row, t] == segments[row, t - lag]:
                    y[row, t] += kernel[len(kernel) - 1 - lag] * x[row, t - lag]
    return y


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, T + 3])
@pytest.mark.parametrize("use_bias", [False, True])
def test_outputs_are_those_of_a_loop(use_bias, size, packed):
    mixer, x = build(size, use_bias=use_bias), draw()
    segments = PACKED if packed else None
    y = mixer(jnp.asarray(x), Places.of(jnp.asarray(segments)) if packed else None)
    tokens = np.ones((B, T), bool) if segments is None else segments > 0
    np.testing.assert_allclose(np.asarray(y)[tokens], loop(mixer, x, segments)[tokens], atol=ATOL, rtol=0)


@pytest.mark.parametrize("size", [1, 4])
def test_outputs_and_gradients_are_those_of_pytorch(size):
    torch = pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")
    mixer, x, readout = build(size), draw(), draw()[::-1].copy()
    reference = torch.nn.Conv1d(D, D, size, groups=D, padding=size - 1)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(np.array(mixer.kernel[...])).T[:, None])
        reference.bias.copy_(torch.tensor(np.array(mixer.bias[...])))
    torch_x = torch.tensor(x, requires_grad=True)
    torch_y = reference(torch_x.transpose(1, 2))[..., :T].transpose(1, 2)
    (torch_y * torch.tensor(readout)).sum().backward()
    graph, params = nnx.split(mixer)
    y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, jnp.asarray(x))
    by_param, by_x = pull(jnp.asarray(readout))
    pairs = [
        (y, torch_y.detach()),
        (by_x, torch_x.grad),
        (by_param["kernel"][...], reference.weight.grad[:, 0].T),
        (by_param["bias"][...], reference.bias.grad),
    ]
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=ATOL * max(1, float(abs(expected).max())), rtol=0)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("cut", [0, 1, 2, 5, T])
def test_it_goes_on_from_where_it_stopped(cut, size):
    mixer, x = build(size), draw()
    state, before = mixer.prefill(mixer.init_state(B, T), jnp.asarray(x[:, :cut]))
    assert state.shape == (B, size - 1, D)
    # what is kept are the last inputs, zeros before the first
    expected = np.pad(x[:, :cut], ((0, 0), (size - 1, 0), (0, 0)))[:, cut:]
    assert (np.asarray(state) == expected).all()
    walked, y = [], loop(mixer, x)
    whole, after = mixer.prefill(state, jnp.asarray(x[:, cut:]))
    for t in range(cut, T):
        state, y_t = mixer.step(state, jnp.asarray(x[:, t]))
        walked.append(y_t)
    np.testing.assert_allclose(np.concatenate([before, after], 1), y, atol=ATOL, rtol=0)
    if walked:
        np.testing.assert_allclose(np.stack(walked, 1), y[:, cut:], atol=ATOL, rtol=0)
    assert (state == whole).all()


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_a_packed_row_goes_on_and_leaves_the_state_of_its_last_sequence(cut):
    size, mixer, x = 4, build(4), draw(cut + T)
    state, _ = mixer.prefill(mixer.init_state(B, T), jnp.asarray(x[:, :cut]))
    state, y = mixer.prefill(state, jnp.asarray(x[:, cut:]), Places.of(jnp.asarray(PACKED)))
    for row, segments in enumerate(PACKED):
        # the first sequence of a row is the one that was begun before
        whole = np.concatenate([np.full(cut, max(segments[0], 1)), segments])
        expected = loop(mixer, x[row : row + 1], whole[None])[0]
        np.testing.assert_allclose(np.asarray(y[row])[segments > 0], expected[cut:][segments > 0], atol=ATOL, rtol=0)
        tokens = whole > 0
        last = whole == whole[tokens][-1] if tokens.any() else tokens
        kept = np.pad(x[row][last], ((size - 1, 0), (0, 0)))[-(size - 1) :]
        assert (np.asarray(state[row]) == kept).all()


def test_a_sequence_alone_has_the_gradient_it_has_among_others():
    mixer, x = build(), jnp.asarray(draw())
    graph, params = nnx.split(mixer)

    def loss(params, x, places=None):
        y = nnx.merge(graph, params)(x, places)
        return (y[:1, 3:7] ** 2).sum() if places is not None else (y**2).sum()

    among = jax.grad(loss, argnums=(0, 1))(params, x, Places.of(jnp.asarray(PACKED)))
    alone = jax.grad(loss, argnums=(0, 1))(params, x[:1, 3:7])
    for actual, expected in zip(jax.tree.leaves(among[0]), jax.tree.leaves(alone[0]), strict=True):
        np.testing.assert_allclose(actual, expected, atol=ATOL * float(abs(expected).max()), rtol=0)
    np.testing.assert_allclose(among[1][:1, 3:7], alone[1], atol=ATOL * float(abs(alone[1]).max()), rtol=0)
    assert not among[1].at[:1, 3:7].set(0.0).any()


def test_it_starts_like_a_linear_layer_of_as_many_inputs():
    kernel = np.float64(ShortConvolution(4096, size=4, rngs=nnx.Rngs(0)).kernel[...])
    assert kernel.shape == (4, 4096) and np.abs(kernel).max() <= 0.5
    # 16384 draws: the mean square of a uniform number in +-1/2 is within 5 standard errors of 1/12
    assert abs((kernel**2).mean() - 1 / 12) < 5 * (kernel**2).std() / 128


@pytest.mark.parametrize("size", [0, -1])
def test_a_convolution_over_nothing_is_refused(size):
    with pytest.raises(ValueError, match=rf"^a convolution over {size} tokens is none; use 1 or more$"):
        ShortConvolution(D, size=size, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("packed", [False, True])
def test_a_mixer_behind_it_sees_the_convolved_stream(packed):
    mixer = Convolved(D, mixer=GRU, size=4, rngs=nnx.Rngs(0))
    mixer.convolution.bias[...] = jnp.arange(1.0, D + 1)
    x, places = draw(), Places.of(jnp.asarray(PACKED)) if packed else None
    convolved = jnp.float32(loop(mixer.convolution, x, PACKED if packed else None))
    tokens = PACKED > 0 if packed else np.ones((B, T), bool)
    # nine steps of a GRU, which contracts: the roundings of the convolution and some 100 of its own
    expected = np.asarray(mixer.mixer(convolved, places))[tokens]
    np.testing.assert_allclose(np.asarray(mixer(jnp.asarray(x), places))[tokens], expected, atol=5e-5, rtol=0)
    assert mixer.causal and not mixer.attends
    state, before = mixer.prefill(mixer.init_state(B, T), jnp.asarray(x[:, :4]))
    state, y_t = mixer.step(state, jnp.asarray(x[:, 4]))
    alone = mixer(jnp.asarray(x))
    np.testing.assert_allclose(before, alone[:, :4], atol=5e-5, rtol=0)
    np.testing.assert_allclose(y_t, alone[:, 4], atol=5e-5, rtol=0)


def test_what_is_scaled_is_the_output_of_the_mixer():
    build = partial(Convolved, D, mixer=GRU, size=4)
    scaled, plain = build(rngs=nnx.Rngs(0)), build(rngs=nnx.Rngs(0))
    scaled.scale_output(0.5)
    x = jnp.asarray(draw())
    np.testing.assert_allclose(scaled(x), 0.5 * plain(x), atol=ATOL, rtol=0)
