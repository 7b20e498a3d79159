"""Attention against numpy written from the formula, and against jax.nn.dot_product_attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.attention import Attention, attend
from seqlab.positions import NoPosition, RoPE

B, T, H, K = 2, 7, 3, 4
D = H * K
# scores are sums of 4 products, outputs of 12, of numbers of a few units: some 50 roundings of 2^-24 of at most 10
ATOL = 3e-5


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def softmax_attention(q, k, v, allowed):
    """q, k, v [T, K] of one head: each row the weighted mean of the values it may see, zero where it may see none."""
    out = np.zeros_like(v)
    for t in range(len(q)):
        seen = np.flatnonzero(allowed[t])
        if len(seen):
            weights = np.exp(k[seen] @ q[t] / np.sqrt(q.shape[-1]))
            out[t] = weights / weights.sum() @ v[seen]
    return out


def turned(x, position):
    if isinstance(position, NoPosition):
        return x
    angle = np.arange(len(x))[:, None] / 10_000 ** (2 * np.arange(K // 2) / K)
    z = (x[:, : K // 2] + 1j * x[:, K // 2 :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", [NoPosition(), RoPE()], ids=["none", "rope"])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_formula_head_by_head(causal, position, masked):
    mixer = Attention(D, heads=H, causal=causal, position=position, rngs=nnx.Rngs(0))
    weights = {}
    for seed, name in enumerate(("query", "key", "value", "out")):
        weights[name] = random(D, D, seed=seed) / np.sqrt(D), random(D, seed=seed + 10)
        linear = getattr(mixer, name)
        linear.kernel[...], linear.bias[...] = map(jnp.float32, weights[name])
    x, mask = random(B, T, D, seed=20), np.ones((B, T), bool)
    if masked:
        mask[0, [0, 3]], mask[1, 4:] = False, False  # in a causal model, row 0 starts with a query that sees nothing

    expected = np.zeros((B, T, D))
    for b in range(B):
        allowed = mask[b][None] & (np.tril(np.ones((T, T), bool)) | (not causal))
        q, k, v = (x[b] @ weights[name][0] + weights[name][1] for name in ("query", "key", "value"))
        mixed = np.zeros((T, D))
        for head in (slice(h * K, (h + 1) * K) for h in range(H)):
            q_head, k_head = (turned(x[:, head], position) for x in (q, k))
            mixed[:, head] = softmax_attention(q_head, k_head, v[:, head], allowed)
        expected[b] = mixed @ weights["out"][0] + weights["out"][1]
    actual = mixer(jnp.float32(x), jnp.asarray(mask) if masked else None)
    np.testing.assert_allclose(actual, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_it_agrees_with_jax_with_gradients(causal):
    q, k, v, readout = (jnp.asarray(random(B, T, H, K, seed=seed), jnp.float32) for seed in range(4))
    allowed = jnp.tril(jnp.ones((1, T, T), bool)) if causal else jnp.ones((1, T, T), bool)

    def ours(q, k, v):
        return attend(q, k, v, allowed)

    def jaxs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    def with_gradients(f):
        y, pull = jax.vjp(f, q, k, v)
        return y, *pull(readout)

    for actual, reference in zip(with_gradients(ours), with_gradients(jaxs), strict=True):
        np.testing.assert_allclose(actual, reference, atol=ATOL, rtol=0)


def test_equal_scores_average_the_values_seen():
    v = jnp.asarray(random(1, T, 1, K), jnp.float32)
    mixed = attend(jnp.zeros((1, T, 1, K)), v, v, jnp.tril(jnp.ones((1, T, T), bool)))
    expected = np.cumsum(np.asarray(v, np.float64)[0, :, 0], 0) / np.arange(1, T + 1)[:, None]
    np.testing.assert_allclose(mixed[0, :, 0], expected, atol=ATOL, rtol=0)


def test_no_score_is_large_enough_to_leak():
    # the forbidden key outscores the allowed one by 1e9 sqrt(K)
    q = jnp.ones((1, 1, 1, K))
    k, v = jnp.stack([-q[0], 1e9 * q[0]], 1), jnp.asarray([[[[1.0] * K], [[7.0] * K]]])
    assert (attend(q, k, v, jnp.asarray([[[True, False]]])) == 1).all()


def test_a_query_that_may_see_nothing_gets_zero_and_finite_gradients():
    q, k, v = (jnp.asarray(random(1, T, 1, K, seed=seed), jnp.float32) for seed in range(3))
    allowed = jnp.ones((1, T, T), bool).at[0, 2].set(False)
    mixed, pull = jax.vjp(lambda q, k, v: attend(q, k, v, allowed), q, k, v)
    assert (mixed[0, 2] == 0).all() and (jnp.abs(mixed[0, 3]) > 0).all()
    gradients = pull(jnp.ones_like(mixed))
    assert all(jnp.isfinite(g).all() for g in gradients) and (gradients[0][0, 2] == 0).all()


def test_each_row_has_its_own_length_in_the_cache():
    # rows at different lengths step as they would alone
    mixer = Attention(D, heads=H, position=RoPE(), rngs=nnx.Rngs(0))
    x = jnp.asarray(random(2, T, D), jnp.float32)
    whole = mixer(x)
    state = mixer.init_state(2, T)
    for t in range(3):
        state, _ = mixer.step(state, x[:, t])
    state["length"] = jnp.asarray([3, 2])  # row 1 takes its last token back
    state, y = mixer.step(state, jnp.stack([x[0, 3], x[1, 2]]))
    np.testing.assert_allclose(y, jnp.stack([whole[0, 3], whole[1, 2]]), atol=ATOL, rtol=0)
    assert state["length"].tolist() == [4, 3]


@pytest.mark.parametrize(("heads", "width"), [(3, 8), (0, 8), (16, 8)])
def test_heads_that_do_not_divide_the_width_are_refused(heads, width):
    message = rf"^model\.width={width} cannot be split into model\.heads={heads}; heads that fit: \[1, 2, 4, 8\]$"
    with pytest.raises(ValueError, match=message):
        Attention(width, heads=heads, rngs=nnx.Rngs(0))


def test_an_odd_head_width_cannot_turn():
    with pytest.raises(ValueError, match=r"model\.width / model\.heads must be even, not 3$"):
        Attention(6, heads=2, position=RoPE(), rngs=nnx.Rngs(0))(jnp.ones((1, 2, 6)))
