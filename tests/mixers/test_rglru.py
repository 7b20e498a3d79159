"""Griffin's recurrent block against loops in float64 and Hugging Face with copied weights, and its starting values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.mixers.base import Recurrence
from seqlab.mixers.rglru import RGLRU, root
from seqlab.types import Places

B, T, D, E, HEADS = 2, 11, 8, 6, 2
# sums of at most eight products three deep over eleven steps: some 200 roundings of 2^-24, relative to the largest
# number; seen 1e-6
TOLERANCE = 2e-5


def randomised(**options):
    mixer = RGLRU(D, state_size=E, heads=HEADS, **options, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.5 * jax.random.normal(keys(), param.shape)
    mixer.rate[...] = mixer.rate[...] - 3.0  # decays of .4 to .9 rather than next to none
    return mixer


def numbers(mixer):
    return jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(mixer, nnx.Param)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def formula(p, x, negative=False):
    """One sequence [T, D], token by token."""
    u = dense(p["inputs"], x)
    size = len(p["convolution"]["kernel"])
    padded = np.concatenate([np.zeros((size - 1, u.shape[1])), u])
    heads = p["decay"].shape[0]
    h, y = np.zeros(u.shape[1]), []
    for t in range(len(x)):
        u = (p["convolution"]["kernel"] * padded[t : t + size]).sum(0) + p["convolution"]["bias"]
        per_head = np.split(u, heads)
        r, i = (
            sigmoid(np.concatenate([part @ block for part, block in zip(per_head, p[name], strict=True)]) + p[bias])
            for name, bias in (("decay", "decay_bias"), ("intake", "intake_bias"))
        )
        a = np.exp(-8 * r * np.log1p(np.exp(p["rate"])))
        a = 2 * a - 1 if negative else a
        h = a * h + np.sqrt(1 - a**2 if t else 1.0) * i * u
        y.append(h)
    return dense(p["out"], np.stack(y) * gelu(dense(p["gate"], x)))


def close(actual, reference):
    reference = np.asarray(reference)
    np.testing.assert_allclose(actual, reference, atol=TOLERANCE * np.abs(reference).max(), rtol=0)


@pytest.mark.parametrize(
    ("scan", "eigenvalues"),
    [("sequential", (0, 1)), ("associative", (0, 1)), ("chunked", (0, 1)), ("sequential", [-1, 1])],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_loop(scan, eigenvalues):
    mixer = randomised(scan=scan, chunk=4, eigenvalue_range=eigenvalues)
    rng = np.random.default_rng(0)
    x, readout, along_x = (rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(3))
    graph, params = nnx.split(mixer)
    along = jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), params)

    @jax.jit
    def outputs_and_slope(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        by_params, by_x = pull(jnp.asarray(readout))
        slopes = jax.tree.map(lambda gradient, way: (gradient * way).sum(), by_params, along)
        return y, sum(jax.tree.leaves(slopes)) + (by_x * along_x).sum()

    def moved(step=0.0):
        p = jax.tree.map(lambda p, way: p + step * way, numbers(mixer), numbers(nnx.merge(graph, along)))
        return np.stack([formula(p, row, eigenvalues[0] == -1) for row in np.float64(x) + step * np.float64(along_x)])

    y, slope = outputs_and_slope(params, jnp.asarray(x))
    close(y, moved())
    # a central difference with step s is wrong by s^2 of the third derivative and by 1e-15 / s, far less than rounding
    difference = ((moved(1e-5) - moved(-1e-5)) * readout).sum() / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=TOLERANCE)


def test_only_the_first_token_of_each_packed_sequence_enters_whole():
    mixer = randomised()
    x = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)
    rows = [[1] * 5 + [2] * 4 + [0] * 2, [1] * 1 + [2] * 10]
    parts = [[x[0, :5], x[0, 5:9]], [x[1, :1], x[1, 1:]]]
    y = jax.jit(mixer)(jnp.asarray(x), Places.of(jnp.array(rows)))
    for row, (first, second) in enumerate(parts):
        reference = [formula(numbers(mixer), np.float64(part)) for part in (first, second)]
        close(y[row, : len(first) + len(second)], np.concatenate(reference))


def test_a_state_knows_whether_it_has_met_a_token():
    mixer = randomised()
    x = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)
    reference = np.stack([formula(numbers(mixer), np.float64(row)) for row in x])
    prefill, step = jax.jit(mixer.prefill), jax.jit(mixer.step)
    for split in (0, 1, 4, T):
        state, before = prefill(mixer.init_state(2, T), jnp.asarray(x[:, :split]))
        assert (state["begun"] == (split > 0)).all()
        _, after = prefill(state, jnp.asarray(x[:, split:]))
        close(jnp.concatenate([before, after], axis=1), reference)
    state = mixer.init_state(2, T)
    # a row of nothing but padding begins nothing: its first token comes later, in a row that has begun already
    state, y = prefill(state, jnp.asarray(x[:, :3]), Places.of(jnp.array([[0, 0, 0], [1, 1, 0]])))
    assert state["begun"].tolist() == [False, True]
    close(y[1, :2], reference[1, :2])
    for t in range(3):
        state, y_t = step(state, jnp.asarray(np.stack([x[0, t], x[1, t + 2]])))
        close(y_t, np.stack([reference[0, t], reference[1, t + 2]]))


@pytest.fixture(scope="module")
def hugging_face():
    """A block with the weights of a mixer."""
    torch = pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")
    pytest.importorskip("transformers", reason="the reference is Hugging Face: pip install 'seqlab[parity]'")
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    def block(mixer):
        config = RecurrentGemmaConfig(
            hidden_size=D,
            lru_width=E,
            num_attention_heads=HEADS,
            conv1d_width=len(mixer.convolution.kernel),
            num_hidden_layers=1,
            intermediate_size=D,
            vocab_size=4,  # room for the ids that the configuration reserves
        )
        theirs = RecurrentGemmaRecurrentBlock(config, 0)
        copied = {name: torch.tensor(np.float32(array)) for name, array in renamed(numbers(mixer)).items()}
        theirs.load_state_dict(copied)
        return theirs.eval()

    return torch, block


def renamed(p):
    return {
        "linear_y.weight": p["gate"]["kernel"].T,
        "linear_y.bias": p["gate"]["bias"],
        "linear_x.weight": p["inputs"]["kernel"].T,
        "linear_x.bias": p["inputs"]["bias"],
        "linear_out.weight": p["out"]["kernel"].T,
        "linear_out.bias": p["out"]["bias"],
        "conv_1d.weight": p["convolution"]["kernel"].T[:, None],
        "conv_1d.bias": p["convolution"]["bias"],
        "rg_lru.recurrent_param": p["rate"],
        "rg_lru.recurrent_gate_weight": p["decay"],
        "rg_lru.recurrent_gate_bias": p["decay_bias"].reshape(HEADS, -1),
        "rg_lru.input_gate_weight": p["intake"],
        "rg_lru.input_gate_bias": p["intake_bias"].reshape(HEADS, -1),
    }


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_are_those_of_hugging_face(hugging_face, packed):
    torch, block = hugging_face
    # theirs starts anew where a position is 0, but for its convolution: with packed rows that sees one token alone
    mixer = randomised(convolution=1 if packed else 4)
    rng = np.random.default_rng(0)
    x, readout = (rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
    segments = np.array([[1] * 5 + [2] * 6, [1] * 2 + [2] * 9] if packed else [[1] * T] * B)
    places = Places.of(jnp.asarray(segments))
    theirs = block(mixer)
    torch_x = torch.tensor(x, requires_grad=True)
    torch_y, _ = theirs(torch_x, torch.tensor(np.asarray(places.positions)), None, use_cache=False)
    (torch_y * torch.tensor(readout)).sum().backward()

    graph, params = nnx.split(mixer)

    @jax.jit
    def with_gradients(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, places), params, x)
        return y, *pull(jnp.asarray(readout))

    y, by_param, by_x = with_gradients(params, x)
    close(y, torch_y.detach())
    close(by_x, torch_x.grad)
    gradients = renamed(numbers(nnx.merge(graph, by_param)))
    for name, param in theirs.named_parameters():
        close(gradients[name], param.grad)


def test_open_gates_start_with_decays_uniform_in_area_on_the_ring():
    mixer = RGLRU(4, state_size=8192, heads=1024, rngs=nnx.Rngs(0))
    decay = np.exp(-8 * np.log1p(np.exp(numbers(mixer)["rate"])))
    # one fixed seed; uniform in area is uniform in a^2; a right start fails with probability 1e-4
    assert (decay >= 0.9 - 1e-6).all() and (decay <= 0.999 + 1e-6).all()  # rounding
    assert stats.kstest(decay**2, stats.uniform(0.9**2, 0.999**2 - 0.9**2).cdf).pvalue > 1e-4
    for gate in ("decay", "intake"):
        blocks = numbers(mixer)[gate]
        assert blocks.shape == (1024, 8, 8)
        assert stats.kstest(blocks.ravel(), stats.norm(0, 8**-0.5).cdf).pvalue > 1e-4


def test_the_slope_of_the_root_is_bounded():
    x = jnp.array([0.0, 1e-12, 2.5e-7, 0.25, 1.0])
    np.testing.assert_array_equal(root(x), jnp.sqrt(x))
    # 1 / (2 sqrt(x)) from 2.5e-7 on, where it is 1000; rsqrt is right to an ulp or two
    np.testing.assert_allclose(jax.vmap(jax.grad(root))(x), [1000, 1000, 1000, 1, 0.5], rtol=1e-6)


def test_a_gate_that_lets_nothing_decay_has_finite_gradients():
    mixer = RGLRU(D, rngs=nnx.Rngs(0))
    mixer.decay_bias[...] = jnp.full(D, -200.0)
    graph, params = nnx.split(mixer)
    gradients = jax.grad(lambda params: nnx.merge(graph, params)(jnp.ones((1, T, D))).sum())(params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_the_rates_alone_belong_to_the_recurrence():
    leaves = nnx.to_flat_state(nnx.state(RGLRU(D, rngs=nnx.Rngs(0))))
    assert [path for path, param in leaves if isinstance(param, Recurrence)] == [("rate",)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "state_size=8 cannot be split into model.heads=3"),
        ({"heads": 0}, "heads=0"),
        ({"eigenvalue_range": [0, 2]}, r"eigenvalue_range=\[0, 2\] is unknown"),
        ({"convolution": 0}, "a convolution over 0 tokens"),
    ],
)
def test_what_cannot_be_built_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        RGLRU(D, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("options", "message"), [({"scan": "wild"}, "scan=wild"), ({"chunk": 0}, "chunk=0")])
def test_what_cannot_be_run_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        RGLRU(D, **options, rngs=nnx.Rngs(0))(jnp.ones((1, 2, D)))
