"""The backbone against its equation in numpy, and what it does around its mixers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.mixers.attention import Attention
from seqlab.mixers.base import Mixer, Recurrence
from seqlab.mixers.rnn import GRU, LSTM, Elman
from seqlab.mixers.ssm import LRU
from seqlab.mlp import MLP, SwiGLU
from seqlab.model import SequenceModel, compute_in, drop
from seqlab.positions import NoPosition, Sinusoidal
from seqlab.rotary import RoPE
from seqlab.types import Places, Stream

B, T, D, V, L = 2, 6, 8, 11, 3
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))


class Double(Mixer):
    """A user's own mixer: twice what each position holds, through a matrix."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(2 * jax.random.normal(rngs.params(), (width, width)) / width**0.5)

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        return x @ self.kernel[...]


class Ones(Double):
    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        return jnp.ones_like(x)


def build(mixer=Double, **settings):
    return SequenceModel(V, width=D, depth=L, mixer=mixer, rngs=nnx.Rngs(0), **settings)


def numbers(param):
    return np.asarray(param[...], np.float64)


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def layer(x, norm, i=None):
    scale, bias = (numbers(p) if i is None else numbers(p)[i] for p in (norm.scale, norm.bias))
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + bias


@pytest.mark.parametrize("norm", [nnx.RMSNorm, nnx.LayerNorm])
@pytest.mark.parametrize("mlp", [None, MLP, SwiGLU])
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_its_equation(norm, mlp, tied):
    model = build(norm=norm, mlp=mlp and partial(mlp, expansion=2), tied=tied, position=Sinusoidal())
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] += 0.1 * jax.random.normal(keys(), param.shape)  # away from ones and zeros

    def normed(x, module, i=None):
        if norm is nnx.LayerNorm:
            return layer(x, module, i)
        return rms(x, numbers(module.scale) if i is None else numbers(module.scale)[i])

    wave = np.arange(T)[:, None] / 10_000 ** (2 * np.arange(D // 2) / D)
    x = numbers(model.embedding)[TOKENS] + np.stack([np.sin(wave), np.cos(wave)], -1).reshape(T, D)
    for i in range(L):
        (block,) = model.blocks
        x = x + normed(x, block.norm_1, i) @ numbers(block.mixer.kernel)[i]
        if mlp is MLP:
            up, out = block.mlp.up, block.mlp.out
            z = normed(x, block.norm_2, i) @ numbers(up.kernel)[i] + numbers(up.bias)[i]
            gelu = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            x = x + gelu @ numbers(out.kernel)[i] + numbers(out.bias)[i]
        if mlp is SwiGLU:
            gate, up = (normed(x, block.norm_2, i) @ numbers(p.kernel)[i] for p in (block.mlp.gate, block.mlp.up))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ numbers(block.mlp.out.kernel)[i]
    head = numbers(model.embedding).T / np.sqrt(D) if tied else numbers(model.head.kernel)
    expected = normed(x, model.norm) @ head
    # three blocks of some 30 roundings of 2^-24 of numbers below 20
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), expected, atol=1e-4, rtol=0)


def test_predictions_are_the_logits_at_the_scored_positions():
    model = build(mixer=GRU)
    scored = np.array([[0, 5, 2], [3, 3, 1]])
    logits = np.asarray(model(jnp.asarray(TOKENS)))
    predicted = model.predict(jnp.asarray(TOKENS), jnp.asarray(scored))
    # the same sums of 8 products in matrices of another shape
    np.testing.assert_allclose(predicted, np.take_along_axis(logits, scored[..., None], 1), atol=1e-5, rtol=0)


def test_layers_start_different():
    matrices = np.asarray(build(mixer=GRU).mixers[0].recurrent["new"][...])
    assert len({matrix.tobytes() for matrix in matrices}) == L


def test_dropout_keeps_the_mean_and_needs_a_key():
    x, rate = jnp.ones(100_000), 0.3
    assert drop(x, rate, None) is x and drop(x, 0.0, jax.random.key(0)) is x
    dropped = np.asarray(drop(x, rate, jax.random.key(0)))
    # one fixed seed; 5 standard errors of a share, which then sets the mean of kept values 1 / .7
    assert abs((dropped == 0).mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    np.testing.assert_allclose(dropped[dropped > 0], 1 / 0.7, rtol=1e-6)  # a rounding or two of 2^-24


def test_dropout_acts_in_every_layer_by_a_key_of_its_own():
    model = build(dropout=0.5, mlp=MLP)
    tokens = jnp.asarray(TOKENS)
    run = jax.jit(lambda key: model(tokens, None, key))
    first, again, other = (run(jax.random.key(seed)) for seed in (0, 0, 1))
    assert (first == again).all() and not np.allclose(first, other, atol=1e-2)
    assert (model(tokens) == model(tokens)).all()
    assert (build(dropout=0.0, mlp=MLP)(tokens, None, jax.random.key(0)) == model(tokens)).all()


def test_each_layer_drops_for_itself():
    model = SequenceModel(V, width=64, depth=L, mixer=Ones, dropout=0.5, rngs=nnx.Rngs(0))
    y = np.asarray(model.hidden(jnp.zeros((2, 32, 64)), None, jax.random.key(0)))
    # each layer adds 0 or 2, so a position holds 0, 2, 4, 6 over its own norm; all 64 miss the 6 by a chance of 2e-4
    layers = y / y.max(-1, keepdims=True) * L
    np.testing.assert_allclose(layers, layers.round(), atol=1e-5)  # a few roundings of 2^-24 of 3
    counts = np.bincount(layers.round().astype(int).ravel(), minlength=L + 1)
    # one fixed seed; were a key used twice there would be no 1 and no 2
    assert stats.chisquare(counts, layers.size * stats.binom(L, 0.5).pmf(range(L + 1))).pvalue > 1e-4


BF16_ROWS = {
    "rnn": (Elman, NoPosition()),
    "gru": (GRU, NoPosition()),
    "lstm": (LSTM, NoPosition()),
    "ssm": (partial(LRU, state_size=6), NoPosition()),
    "attention": (partial(Attention, heads=2, position=RoPE()), RoPE()),
}


@pytest.mark.parametrize("name", BF16_ROWS)
def test_a_forward_pass_in_bfloat16_keeps_its_recurrence_in_float32(name):
    mixer, position = BF16_ROWS[name]
    model = build(mixer=mixer, position=position, mlp=MLP)
    graph, params = nnx.split(model)
    low = compute_in(jnp.dtype(jnp.bfloat16), params)
    for param in jax.tree.leaves(low, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        assert param.dtype == (jnp.float32 if isinstance(param, Recurrence) else jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix types
        lowered = nnx.merge(graph, low)
        logits = jax.jit(lambda: lowered(jnp.asarray(TOKENS)))()
        state, _ = jax.eval_shape(lowered.step, lowered.init_state(B, T), jnp.asarray(TOKENS[:, 0]))
    assert logits.dtype == jnp.bfloat16
    kept = jnp.bfloat16 if name == "attention" else jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state["layers"])} - {jnp.dtype(jnp.int32)} == {jnp.dtype(kept)}
    exact = np.asarray(model(jnp.asarray(TOKENS)), np.float64)
    # three blocks of some 8 roundings of 2^-9 one after another, each of its own sign: sqrt(24) 2^-9 = .01, times three
    error = np.linalg.norm(np.asarray(logits, np.float64) - exact) / np.linalg.norm(exact)
    assert error < 0.03


@pytest.mark.parametrize("bidirectional", [False, True, "concat"])
def test_rope_needs_attention(bidirectional):
    with pytest.raises(ValueError, match=r"^position=rope acts on attention, .* has none; use position=none$"):
        build(mixer=GRU, position=RoPE(), bidirectional=bidirectional)
    attention = partial(Attention, heads=2, position=RoPE())
    assert build(mixer=attention, position=RoPE(), bidirectional=bidirectional).causal == (not bidirectional)


def test_an_unknown_direction_is_named():
    with pytest.raises(ValueError, match=r"^model\.bidirectional=mean is unknown; use false, true, sum or concat"):
        build(mixer=GRU, bidirectional="mean")


def test_an_encoder_is_not_made_bidirectional():
    with pytest.raises(ValueError, match=r"leave model\.bidirectional=false"):
        build(mixer=partial(Attention, heads=2, causal=False), bidirectional=True)


def test_a_pattern_of_mixers_repeats_along_the_depth():
    model = SequenceModel(V, width=D, depth=4, mixer=[Double, Ones], rngs=nnx.Rngs(0))
    assert [type(mixer) for mixer in model.mixers] == [Double, Ones] and model.repeats == 2
    x = numbers(model.embedding)[TOKENS]
    double, _ = model.blocks
    for i in range(2):
        x = x + rms(x, numbers(double.norm_1.scale)[i]) @ numbers(double.mixer.kernel)[i]
        x = x + 1
    expected = rms(x, 1) @ numbers(model.head.kernel)
    # four blocks of some 30 roundings of 2^-24 of numbers below 20
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("depth", "pattern"), [(3, [GRU, Double]), (2, []), (1, [GRU, GRU])])
def test_a_pattern_divides_the_depth(depth, pattern):
    with pytest.raises(ValueError, match=rf"^model\.depth={depth} is no multiple of the {len(pattern)} mixers"):
        SequenceModel(V, width=D, depth=depth, mixer=pattern, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mlp", [None, MLP])
def test_residual_scaling_divides_the_last_projection_by_the_root_of_the_branches(mlp, bidirectional):
    plain, scaled = (
        build(mixer=GRU, mlp=mlp, bidirectional=bidirectional, residual_scaling=flag) for flag in (False, True)
    )
    branches = L * (2 if mlp else 1)
    changed = set()
    for (path, before), (_, after) in zip(
        nnx.to_flat_state(nnx.state(plain)), nnx.to_flat_state(nnx.state(scaled)), strict=True
    ):
        if (np.asarray(before[...]) != np.asarray(after[...])).any():
            changed.add(path[2:])
            np.testing.assert_allclose(after[...], before[...] / np.sqrt(branches), rtol=1e-6)  # one product
    mixers = {("forward",), ("backward",)} if bidirectional else {()}
    assert changed == {("mixer", *m, "out", "kernel") for m in mixers} | ({("mlp", "out", "kernel")} if mlp else set())


def test_a_mixer_without_a_projection_is_not_scaled():
    with pytest.raises(
        ValueError, match=r"^Double has no projection `out` to scale; use model\.residual_scaling=false"
    ):
        build(residual_scaling=True)


def test_an_mlp_without_units_is_none():
    with pytest.raises(ValueError, match=r"^mlp\.expansion=0\.01 leaves an MLP without units"):
        build(mlp=partial(MLP, expansion=0.01))


def test_a_prefix_all_at_once_and_the_rest_step_by_step():
    model = build(mixer=[GRU], convolution=3, position=Sinusoidal())
    logits = np.asarray(model(jnp.asarray(TOKENS)))
    for split in range(T + 1):
        state, x = model.prefill(model.init_state(B, T), jnp.asarray(TOKENS[:, :split]))
        together = [*np.asarray(model.unembed(x)).swapaxes(0, 1)]
        for t in range(split, T):
            state, y = model.step(state, jnp.asarray(TOKENS[:, t]))
            together.append(np.asarray(y))
        # the same sums of 8 products in matrices of another shape, through three blocks
        np.testing.assert_allclose(np.stack(together, 1), logits, atol=1e-5, rtol=0)
        assert state["position"].tolist() == [T, T]


def test_the_state_after_a_packed_row_is_that_of_its_last_sequence():
    model = build(mixer=GRU, position=Sinusoidal())
    segments = jnp.array([[1, 1, 0, 2, 2, 0], [0, 4, 4, 4, 0, 4]])
    state, _ = model.prefill(model.init_state(B, T), jnp.asarray(TOKENS), segments)
    for row, places in enumerate(([3, 4], [1, 2, 3, 5])):
        alone, _ = model.prefill(model.init_state(1, T), jnp.asarray(TOKENS[row : row + 1, places]))
        for leaf, expected in zip(jax.tree.leaves(state["layers"]), jax.tree.leaves(alone["layers"]), strict=True):
            # the same sums of 8 products in matrices of another shape, through three blocks
            np.testing.assert_allclose(leaf[:, row], expected[:, 0], atol=1e-5, rtol=0)
        assert state["position"][row] == len(places) == alone["position"][0]
