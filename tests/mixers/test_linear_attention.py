"""Linear attention and its gated form against loops over their formulas in float64, and their starting values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.linear_attention import GLA, LinearAttention, positive

B, T, D, H = 2, 9, 12, 3
W = D // H  # values of a head
# nine steps of sums of twelve products: some 200 roundings of 2^-24, of the largest number; the norm of a head, whose
# root mean square may be a tenth of its largest partial sum, and the normaliser may raise that tenfold
ROUNDING = 1e-4
STEP = 1e-5  # of differences of the loop, whose error of 1e-10 is nothing beside float32

KINDS = {
    "sum": lambda: LinearAttention(D, heads=H, chunk=4, rngs=nnx.Rngs(0)),
    "gated": lambda: GLA(D, heads=H, key_width=3, rank=5, chunk=4, rngs=nnx.Rngs(0)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def numbers(state):
    return jax.tree.map(np.float64, nnx.to_pure_dict(state))


def randomised(kind):
    mixer = KINDS[kind]()
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.5 * jax.random.normal(keys(), param.shape)
    return mixer


def project(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def heads(x):
    return x.reshape(B, T, H, -1)


def attention(p, x):
    """As attention: a weight for each pair of tokens, divided by the sum of a query's."""
    q, k, v = (heads(project(p[name], x)) for name in ("query", "key", "value"))
    weights = np.einsum("bthk,bshk->bhts", phi(q), phi(k)) * np.tril(np.ones((T, T)))
    y = np.einsum("bhts,bshw->bthw", weights, v) / (weights.sum(-1).transpose(0, 2, 1)[..., None] + 1e-6)
    return project(p["out"], y.reshape(B, T, D))


def gated(p, x):
    q, k, v = (heads(project(p[name], x)) for name in ("query", "key", "value"))
    decay = heads(sigmoid(project(p["decay_up"], project(p["decay_down"], x))) ** (1 / 16))
    o = np.zeros((B, T, H, W))
    state = np.zeros((B, H, k.shape[-1], W))
    for t in range(T):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        o[:, t] = (state * q[:, t, :, :, None]).sum(2) / k.shape[-1] ** 0.5
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]["scale"]
    return project(p["out"], silu(project(p["gate"], x)) * o.reshape(B, T, D))


ORACLES = {"sum": attention, "gated": gated}


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(B, T, D))


@kinds
def test_outputs_are_those_of_the_formula(kind, x):
    mixer = randomised(kind)
    reference = ORACLES[kind](numbers(nnx.state(mixer)), x)
    np.testing.assert_allclose(mixer(jnp.float32(x)), reference, rtol=0, atol=ROUNDING * abs(reference).max())


@kinds
def test_gradients_are_the_differences_of_the_formula(kind, x):
    mixer = randomised(kind)
    graph, params = nnx.split(mixer)
    rng = np.random.default_rng(1)
    readout = rng.normal(size=x.shape)

    @jax.jit
    def gradients(params, x):
        return jax.grad(lambda params, x: (nnx.merge(graph, params)(x) * jnp.float32(readout)).sum(), (0, 1))(params, x)

    by_param, by_x = gradients(params, jnp.float32(x))
    leaves, tree = jax.tree.flatten((numbers(params), x))
    for index, gradient in enumerate(jax.tree.leaves((numbers(by_param), np.float64(by_x)))):
        direction = rng.normal(size=gradient.shape)

        def read(sign, index=index, direction=direction):
            moved = [leaf + sign * STEP * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            return (ORACLES[kind](*jax.tree.unflatten(tree, moved)) * readout).sum()

        expected = (read(1) - read(-1)) / (2 * STEP)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs((gradient * direction).sum() - expected) <= ROUNDING * max(1, size)


def test_features_of_keys_are_positive_and_exact_to_the_last_digit():
    x = np.array([-80.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 1e4])
    np.testing.assert_allclose(
        positive(jnp.float32(x)), phi(np.float64(np.float32(x))), rtol=4e-6
    )  # exp of 80 (1 + 2^-24)
    slope = jax.vmap(jax.grad(positive))(jnp.float32(x))
    np.testing.assert_allclose(slope, np.where(x > 0, 1.0, np.exp(np.minimum(x, 0))), rtol=6e-6)


def test_a_read_out_is_a_mean_of_the_values_whatever_the_queries(x):
    mixer = KINDS["sum"]()
    value, out = mixer.value, mixer.out
    value.kernel[...] = jnp.zeros((D, D))
    value.bias[...] = jnp.arange(D, dtype=jnp.float32)
    out.kernel[...], out.bias[...] = jnp.eye(D), jnp.zeros(D)
    # up to 1e-6 of the sum of weights, of which none is above the others by more than an e^4
    np.testing.assert_allclose(mixer(jnp.float32(x)), np.broadcast_to(np.arange(D), x.shape), rtol=1e-5)


def test_a_gate_starts_by_keeping_most_of_the_state():
    mixer = GLA(256, heads=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (500, 256))
    decay = np.asarray(jax.nn.sigmoid(mixer.decay_up(mixer.decay_down(x))) ** (1 / 16))
    # projections that keep the variance: sigmoid(N(0, 1))^(1/16) lies between these for all within 4 deviations
    assert (decay > sigmoid(-5) ** (1 / 16)).all()
    assert abs(np.median(decay) - 0.5 ** (1 / 16)) < 1e-3
    assert np.log(decay).std() > 0.01  # and depends on the token


def test_sizes_follow_the_heads():
    mixer = GLA(32, heads=4, rngs=nnx.Rngs(0))
    assert mixer.init_state(2, 100).shape == (2, 4, 4, 8)
    assert mixer.decay_up.kernel.shape == (16, 16)
    assert GLA(4, heads=4, rngs=nnx.Rngs(0)).key_width == 1
    assert LinearAttention(32, heads=4, rngs=nnx.Rngs(0)).init_state(2, 100).shape == (2, 4, 8, 9)


@pytest.mark.parametrize("kind", [LinearAttention, GLA])
@pytest.mark.parametrize("heads", [0, 5, 24])
def test_heads_that_do_not_divide_the_width_are_refused(kind, heads):
    with pytest.raises(
        ValueError,
        match=rf"model\.width=12 cannot be split into model\.heads={heads}; heads that fit: \[1, 2, 3, 4, 6, 12\]",
    ):
        kind(12, heads=heads, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("sizes", [{"key_width": 0}, {"rank": 0}], ids=str)
def test_empty_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"model\.(key_width|rank)=0 must be at least 1"):
        GLA(12, heads=3, **sizes, rngs=nnx.Rngs(0))


@kinds
def test_in_bfloat16_states_stay_float32_and_outputs_come_near_those_in_float32(kind, x):
    mixer = randomised(kind)
    reference = np.asarray(mixer(jnp.float32(x)))
    graph, params = nnx.split(mixer)
    mixer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    state, y = mixer.prefill(mixer.init_state(B, T), jnp.bfloat16(x))
    assert (state.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)
    # 2^-8 on each of inputs, weights and projections, a few times over
    assert np.linalg.norm(np.float32(y) - reference) <= 0.1 * np.linalg.norm(reference)
