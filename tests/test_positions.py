"""Position schemes against their formulas in numpy, in float64, and against transformers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from hydra.utils import instantiate

from seqlab.mixers.rnn import Elman
from seqlab.model import SequenceModel
from seqlab.positions import T5, ALiBi, Learned, NoPosition, Position, Sinusoidal
from seqlab.rotary import LinearRoPE, NTKRoPE, RoPE, YaRN

POSITIONS = np.array([0, 1, 2, 3, 17, 50, 99, 100])
T = len(POSITIONS)
PLACES = jnp.asarray(POSITIONS)[None]
# an angle is p f with f below 1: f is rounded to 2^-24 f, and so is the product
ATOL = 100 * 4 * 2**-24
# numbers that transformers computes in float32, in some ten roundings
RTOL = 10 * 2**-24

CONF = Path(__file__).parents[1] / "conf" / "position"
SCHEMES = [instantiate(yaml.safe_load(path.read_text())) for path in sorted(CONF.glob("*.yaml"))]


def named(schemes):
    return pytest.mark.parametrize("scheme", schemes, ids=lambda scheme: scheme.name)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


def test_each_scheme_is_called_as_the_command_line_calls_it():
    assert [scheme.name for scheme in SCHEMES] == [path.stem for path in sorted(CONF.glob("*.yaml"))]
    assert all(isinstance(scheme, Position) and hash(scheme) == hash(scheme) for scheme in SCHEMES)


@named(SCHEMES)
def test_each_scheme_leaves_the_doors_it_does_not_use_as_they_are(scheme):
    x, heads = jnp.ones((1, T, 4)), jnp.ones((1, T, 2, 4))
    rngs = nnx.Rngs(0)
    stream, score = scheme.stream_params(4, rngs), scheme.score_params(2, rngs)
    used = {
        "embed": scheme.embed(x, PLACES, None if stream is None else stream[...]) is not x,
        "rotate": scheme.rotate(heads, PLACES) is not heads,
        "bias": scheme.bias(2, True, None if score is None else score[...]) is not None,
    }
    door = {Sinusoidal: "embed", Learned: "embed", ALiBi: "bias", T5: "bias", NoPosition: None}
    assert [name for name, yes in used.items() if yes] == [n for n in [door.get(type(scheme), "rotate")] if n]
    assert (stream is not None, score is not None) == (isinstance(scheme, Learned), isinstance(scheme, T5))
    assert scheme.needs_attention == (used["rotate"] or used["bias"])
    assert scheme.absolute == used["embed"] and scheme.sees_order == any(used.values())
    assert scheme.limit == (scheme.length if isinstance(scheme, Learned) else None)


@pytest.mark.parametrize("base", [10_000.0, 100])
@pytest.mark.parametrize("width", [8, 7])
def test_sinusoids_follow_the_formula(width, base):
    waves = np.array(
        [[(np.cos if d % 2 else np.sin)(p / base ** (2 * (d // 2) / width)) for d in range(width)] for p in POSITIONS]
    )
    x = random(2, T, width)
    actual = Sinusoidal(base).embed(jnp.float32(x), PLACES)
    np.testing.assert_allclose(actual, x + waves, atol=ATOL, rtol=0)


def test_a_sinusoid_further_on_is_a_rotation():
    # PE(p + k) = R(k) PE(p): R turns each pair (sin, cos) by k f (Vaswani et al. 2017, section 3.5)
    width, k = 8, 30
    shifted, here = (
        np.asarray(Sinusoidal().embed(jnp.zeros((1, T, width)), positions))[0] for positions in (PLACES + k, PLACES)
    )
    turn = np.exp(1j * k / 10_000 ** (2 * np.arange(width // 2) / width))
    expected = (here[:, 1::2] + 1j * here[:, ::2]) * turn
    np.testing.assert_allclose(shifted[:, 1::2] + 1j * shifted[:, ::2], expected, atol=2 * ATOL, rtol=0)


@pytest.mark.parametrize("base", [10_000.0, 100])
def test_rope_is_a_complex_product(base):
    width = 6
    x = random(2, T, 3, width)
    turn = np.exp(1j * POSITIONS[:, None] / base ** (2 * np.arange(width // 2) / width))
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn[:, None, :]
    actual = RoPE(base).rotate(jnp.float32(x), PLACES)
    # two products of numbers below 4
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], -1), atol=8 * ATOL, rtol=0)


def scores(scheme, positions):
    """Of the same queries and keys at other positions, with what is added to them [2, 3, T, T]."""
    q, k = (jnp.asarray(x, jnp.float32) for x in np.split(random(4, T, 3, 8), 2))
    products = jnp.einsum("BTHK,BSHK->BHTS", scheme.rotate(q, positions), scheme.rotate(k, positions))
    params = scheme.score_params(3, nnx.Rngs(0))
    bias = scheme.bias(3, False, None if params is None else params[...])
    return products if bias is None else products + jnp.broadcast_to(bias(positions, positions), products.shape)


@named([scheme for scheme in SCHEMES if scheme.needs_attention])
@pytest.mark.parametrize("shift", [1, 100, 10_000])
def test_scores_depend_on_distance_alone(scheme, shift):
    # the angle as above, with p up to 100 + shift; a score is a sum of 8 products of numbers below 4
    atol = 8 * 4 * (100 + shift) * 4 * 2**-24
    here = scores(scheme, PLACES)
    np.testing.assert_allclose(scores(scheme, PLACES + shift), here, atol=atol, rtol=0)
    assert np.abs(scores(scheme, 2 * PLACES) - here).max() > 0.1


def test_linear_scaling_is_rope_at_fractions_of_a_position():
    np.testing.assert_array_equal(LinearRoPE(factor=4).frequencies(8), RoPE().frequencies(8) / 4)
    x = jnp.asarray(random(1, T, 2, 8), jnp.float32)
    # a factor that is a power of two commutes with rounding
    np.testing.assert_array_equal(LinearRoPE(factor=4).rotate(x, 4 * PLACES), RoPE().rotate(x, PLACES))


@pytest.mark.parametrize("width", [4, 8, 64])
@pytest.mark.parametrize("base", [10_000.0, 100])
def test_ntk_scaling_slows_the_slowest_pair_alone_by_the_whole_factor(base, width):
    speed = NTKRoPE(base=base, factor=8).frequencies(width) / RoPE(base).frequencies(width)
    # a few roundings in float64
    np.testing.assert_allclose(speed[[0, -1]], [1, 1 / 8], rtol=1e-14)
    np.testing.assert_allclose(speed[1:] / speed[:-1], 8 ** (-1 / (width / 2 - 1)), rtol=1e-14)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    scheme, width = YaRN(factor=8, original_length=2048), 64
    fast = RoPE().frequencies(width)
    speed, turns = scheme.frequencies(width) / fast, 2048 * fast / (2 * np.pi)
    assert (speed[turns > 32] == 1).all() and (turns > 32).sum() > 5
    # the ramp ends at a whole pair, which may be the first with fewer turns
    assert (speed[turns < 1][1:] == 1 / 8).all() and (turns < 1).sum() > 5
    assert (np.diff(speed) <= 0).all() and len(np.unique(speed)) > 10


def test_yarn_sharpens_scores():
    x, still = jnp.asarray(random(1, T, 3, 8), jnp.float32), jnp.zeros((1, T), jnp.int32)
    factor = 0.1 * np.log(16) + 1
    np.testing.assert_allclose(YaRN(factor=16).rotate(x, still), np.asarray(x, np.float64) * factor, rtol=RTOL)
    assert YaRN(factor=1).stretch == 1


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("length", [64, 4096])
def test_scaled_frequencies_are_those_of_transformers(width, length):
    pytest.importorskip("transformers", reason="the reference is transformers: pip install 'seqlab[parity]'")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def reference(kind, factor, seq_len=None):
        parameters = {"rope_type": kind, "rope_theta": 500.0, "factor": factor}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = length
        config = LlamaConfig(
            hidden_size=2 * width, num_attention_heads=2, max_position_embeddings=length, rope_parameters=parameters
        )
        frequencies, stretch = ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)
        return frequencies.numpy(), stretch

    pairs = [
        (LinearRoPE(base=500, factor=4), reference("linear", 4.0)),
        (YaRN(base=500, factor=4, original_length=length), reference("yarn", 4.0)),
        (NTKRoPE(base=500, factor=4), reference("dynamic", 1.0, 4 * length)),  # factor 4 at four times the length
    ]
    for scheme, (frequencies, stretch) in pairs:
        np.testing.assert_allclose(scheme.frequencies(width), frequencies, rtol=RTOL)
        assert scheme.stretch == pytest.approx(stretch, rel=1e-12)


def test_rope_keeps_its_type_but_not_its_rounding():
    x = jnp.asarray(random(1, T, 2, 4), jnp.bfloat16)
    actual = RoPE().rotate(x, PLACES)
    assert actual.dtype == jnp.bfloat16
    exact = RoPE().rotate(x.astype(jnp.float32), PLACES)
    # rounded once, at the end; an angle of 100 in bfloat16 would be off by .25
    assert (actual == exact.astype(jnp.bfloat16)).all()


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_array_equal(ALiBi.slopes(8), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    # a few roundings in float64
    np.testing.assert_allclose(ALiBi.slopes(16), 2.0 ** (-np.arange(1, 17) / 2), rtol=1e-14)
    np.testing.assert_allclose(ALiBi.slopes(12), [*ALiBi.slopes(8), *ALiBi.slopes(16)[0:8:2]], rtol=1e-14)
    np.testing.assert_array_equal(ALiBi.slopes(1), [1 / 256])


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes_are_those_of_transformers(heads):
    torch = pytest.importorskip("torch", reason="the reference needs PyTorch: pip install 'seqlab[parity]'")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom", reason="transformers: see seqlab[parity]")
    alibi = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # slope x position of the key
    np.testing.assert_allclose(ALiBi.slopes(heads), alibi[:, 0, 1], rtol=RTOL)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_falls_with_distance_on_both_sides(causal):
    queries, keys = PLACES + 5, jnp.asarray(POSITIONS[:3])[None]
    bias = ALiBi().bias(4, causal)(queries, keys)
    distance = np.abs(POSITIONS[:, None] + 5 - POSITIONS[None, :3])
    expected = -(2.0 ** -np.array([2, 4, 6, 8]))[:, None, None] * distance
    np.testing.assert_array_equal(bias[0], expected)  # powers of two times small whole numbers


def bucket(distance, causal, count, furthest):
    """Of a key that many positions after the query (Raffel et al. 2020, as their code has it), in float64."""
    if not causal:
        return (distance > 0) * count // 2 + bucket(-abs(distance), True, count // 2, furthest)
    distance, single = max(-distance, 0), count // 2
    if distance < single:
        return distance
    grown = np.log(distance / single) / np.log(furthest / single) * (count - single)
    return min(single + int(grown + 1e-9), count - 1)  # where a bucket starts at a whole number, the log may round down


@pytest.mark.parametrize(("count", "furthest"), [(32, 128), (4, 3), (6, 10), (16, 20)])
@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_follow_the_formula(causal, count, furthest):
    table = random(count, 3).astype(np.float32)
    bias = T5(count, furthest).bias(3, causal, jnp.asarray(table))
    queries, keys = np.arange(0, 300, 50), np.arange(300)
    if causal:
        keys = keys[keys <= queries.max()]
    actual = np.asarray(bias(jnp.asarray(queries)[None], jnp.asarray(keys)[None]))
    assert actual.shape == (1, 3, len(queries), len(keys))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if key <= query or not causal:
                assert (actual[0, :, i, j] == table[bucket(key - query, causal, count, furthest)]).all()


@pytest.mark.parametrize(("count", "furthest"), [(32, 128), (8, 20)])
@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_transformers(causal, count, furthest):
    torch = pytest.importorskip("torch", reason="the reference needs PyTorch: pip install 'seqlab[parity]'")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers: see seqlab[parity]")
    distance = np.arange(-300, 1 if causal else 301)
    buckets = t5.T5Attention._relative_position_bucket(torch.tensor(distance), not causal, count, furthest)
    # read out of a table that names its rows
    bias = T5(count, furthest).bias(1, causal, jnp.arange(count, dtype=jnp.float32)[:, None])
    actual = bias(jnp.asarray([[300]]), jnp.asarray(300 + distance)[None])[0, 0, 0]
    np.testing.assert_array_equal(actual, buckets)


def test_what_a_bucket_learns_is_the_sum_over_its_pairs():
    scheme, positions = T5(8, 16), jnp.arange(40)[None]

    def total(table):
        return scheme.bias(2, False, table)(positions, positions).sum()

    counts = np.zeros(8)
    for query in range(40):
        for key in range(40):
            counts[bucket(key - query, False, 8, 16)] += 1
    np.testing.assert_array_equal(jax.grad(total)(jnp.zeros((8, 2))), np.stack([counts, counts], 1))


def test_t5_starts_small_and_different_everywhere():
    params = T5().score_params(4, nnx.Rngs(0))
    assert params[...].shape == (32, 4) and len(np.unique(params[...])) == 128
    # uniform with variance 2 / (32 + 4): the standard error of the variance of 128 numbers is below a tenth of it
    assert float(params[...].var()) == pytest.approx(2 / 36, rel=0.3)
    assert float(jnp.abs(params[...]).max()) <= np.sqrt(3 * 2 / 36)


def test_learned_positions_are_rows_of_a_table():
    table, x = jnp.asarray(random(101, 4), jnp.float32), jnp.asarray(random(2, T, 4), jnp.float32)
    scheme = Learned(101)
    np.testing.assert_array_equal(scheme.embed(x, PLACES, table), x + table[POSITIONS][None])
    each = jnp.stack([PLACES[0], PLACES[0, ::-1]])  # rows at positions of their own
    np.testing.assert_array_equal(scheme.embed(x, each, table), x + table[each])
    gradient = jax.grad(lambda table: scheme.embed(x, PLACES, table).sum())(table)
    expected = np.zeros((101, 4))
    expected[POSITIONS] = 2  # rows
    np.testing.assert_array_equal(gradient, expected)


def test_learned_positions_start_as_large_as_tokens():
    params = Learned(50).stream_params(40, nnx.Rngs(0))
    assert params[...].shape == (50, 40)
    # the standard error of the variance of 2,000 normal numbers is 3 %
    assert float(params[...].var()) == pytest.approx(1, rel=0.15)


def test_positions_beyond_the_table_are_refused_or_no_numbers():
    scheme = Learned(100)
    scheme.admit(100)
    with pytest.raises(ValueError, match=r"^position=learned has 100 positions; T=101 needs position\.length=101$"):
        scheme.admit(101)
    y = scheme.embed(jnp.zeros((1, T, 4)), PLACES, jnp.ones((100, 4)))
    assert jnp.isfinite(y[:, :-1]).all() and jnp.isnan(y[:, -1]).all()
    NoPosition().admit(10**9)


@pytest.mark.parametrize("scheme", [RoPE(), LinearRoPE(), NTKRoPE(), YaRN()], ids=lambda scheme: scheme.name)
def test_an_odd_rotary_width_is_refused(scheme):
    message = rf"^position={scheme.name} turns .* model\.width / model\.heads must be even, not 3$"
    with pytest.raises(ValueError, match=message):
        scheme.rotate(jnp.ones((1, 2, 1, 3)), jnp.arange(2)[None])


def test_a_single_pair_cannot_be_both_fast_and_slow():
    with pytest.raises(ValueError, match=r"^position=rope_ntk needs a head width .* of at least 4, not 2$"):
        NTKRoPE().rotate(jnp.ones((1, 2, 1, 2)), jnp.arange(2)[None])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sinusoidal(base=1), r"position\.base=1 must be above 1"),
        (lambda: RoPE(base=0.5), r"position\.base=0\.5 must be above 1"),
        (lambda: YaRN(base=-1), r"position\.base=-1 must be above 1"),
        (lambda: LinearRoPE(factor=0.5), r"position\.factor=0\.5 must be at least 1"),
        (lambda: NTKRoPE(factor=0), r"position\.factor=0 must be at least 1"),
        (lambda: YaRN(factor=0), r"position\.factor=0 must be at least 1"),
        (lambda: YaRN(original_length=0), r"position\.original_length=0 must be at least 1"),
        (lambda: YaRN(beta_fast=1), r"position\.beta_fast=1 must be above position\.beta_slow=1, and both above 0"),
        (lambda: YaRN(beta_slow=0), r"position\.beta_fast=32 must be above position\.beta_slow=0, and both above 0"),
        (lambda: Learned(0), r"position\.length=0 must be at least 1"),
        (lambda: T5(num_buckets=7), r"position\.num_buckets=7 must be even and at least 4"),
        (lambda: T5(num_buckets=2), r"position\.num_buckets=2 must be even and at least 4"),
        (lambda: T5(max_distance=16), r"position\.max_distance=16 must be above half of position\.num_buckets=32"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(build, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build()


def test_positions_of_one_token_a_row_are_those_of_a_sequence():
    # the step form: a row of tokens, each at a position of its own
    heads, x = (jnp.asarray(random(*shape), jnp.float32) for shape in ((T, 1, 2, 4), (T, 1, 4)))
    positions = PLACES[0][:, None]
    np.testing.assert_array_equal(RoPE().rotate(heads, positions)[:, 0], RoPE().rotate(heads[:, 0][None], PLACES)[0])
    np.testing.assert_array_equal(Sinusoidal().embed(x, positions)[:, 0], Sinusoidal().embed(x[:, 0][None], PLACES)[0])


def test_a_model_refuses_what_its_table_cannot_hold():
    model = SequenceModel(5, width=4, depth=1, mixer=Elman, position=Learned(6), rngs=nnx.Rngs(0))
    tokens = jnp.ones((1, 12), jnp.int32)
    for refused in (lambda: model(tokens), lambda: model.init_state(1, 12)):
        with pytest.raises(ValueError, match=r"^position=learned has 6 positions; T=12 needs position\.length=12$"):
            refused()
    # two sequences that fit stand in a row that would not
    assert jnp.isfinite(model(tokens, jnp.asarray([[1] * 6 + [2] * 6]))).all()
    assert model.position_params is not None and model.position_params[...].shape == (6, 4)
