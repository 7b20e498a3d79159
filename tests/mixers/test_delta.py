"""Delta networks against loops over their formulas in float64 and Hugging Face's layer, and their starting values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.base import Recurrence
from seqlab.mixers.delta import DeltaNet, GatedDeltaNet

B, T, D, H = 2, 9, 12, 3
K = D // H
# nine steps of sums of twelve products: some 200 roundings of 2^-24, of the largest number; the norms of heads, whose
# length may be a tenth of that, raise it tenfold
ROUNDING = 1e-4
STEP = 1e-5  # of differences of the loop, whose error of 1e-10 is nothing beside float32

NETS = pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet])


def numbers(state):
    return jax.tree.map(np.float64, nnx.to_pure_dict(state))


def randomised(kind, **options):
    mixer = kind(D, heads=H, chunk=4, rngs=nnx.Rngs(0), **options)
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.5 * jax.random.normal(keys(), param.shape)
    return mixer


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def convolved(p, name, x):
    x, kernel = x @ p["inputs"][name]["kernel"], p["convolutions"][name]["kernel"]
    past = np.concatenate([np.zeros((B, 3, D)), x], axis=1)
    y = sum(kernel[i] * past[:, i : i + T] for i in range(4))
    return silu(y).reshape(B, T, H, K)


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def oracle(kind, largest, p, x):
    q, k, v = (convolved(p, name, x) for name in ("query", "key", "value"))
    q, k = unit(q) / K**0.5, unit(k)
    beta = largest * sigmoid(x @ p["beta"]["kernel"])
    decay = np.ones((B, T, H))
    if kind is GatedDeltaNet:
        decay = np.exp(-np.exp(p["a_log"]) * np.log1p(np.exp(x @ p["decay"]["kernel"] + p["decay_bias"])))
    o = np.zeros((B, T, H, K))
    for b in range(B):
        for h in range(H):
            state = np.zeros((K, K))
            for t in range(T):
                key = k[b, t, h]
                state = decay[b, t, h] * (np.eye(K) - beta[b, t, h] * np.outer(key, key)) @ state
                state += beta[b, t, h] * np.outer(key, v[b, t, h])
                o[b, t, h] = q[b, t, h] @ state
    y = (o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]["scale"]).reshape(B, T, D)
    if kind is GatedDeltaNet:
        y = y * silu(x @ p["gate"]["kernel"])
    return y @ p["out"]["kernel"]


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(B, T, D))


@NETS
@pytest.mark.parametrize(("eigenvalue_range", "largest"), [((0, 1), 1), ([-1, 1], 2)])
def test_outputs_are_those_of_the_formula(kind, eigenvalue_range, largest, x):
    mixer = randomised(kind, eigenvalue_range=eigenvalue_range)
    reference = oracle(kind, largest, numbers(nnx.state(mixer)), x)
    np.testing.assert_allclose(mixer(jnp.float32(x)), reference, rtol=0, atol=ROUNDING * abs(reference).max())


@NETS
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
            return (oracle(kind, 1, *jax.tree.unflatten(tree, moved)) * readout).sum()

        expected = (read(1) - read(-1)) / (2 * STEP)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs((gradient * direction).sum() - expected) <= ROUNDING * max(1, size)


def test_a_gated_delta_net_is_that_of_hugging_face(x):
    reason = "the reference is Hugging Face's Qwen3-Next: pip install 'seqlab[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason=reason)
    from transformers import Qwen3NextConfig

    sizes = {"linear_num_key_heads": H, "linear_num_value_heads": H}
    sizes |= {"linear_key_head_dim": K, "linear_value_head_dim": K, "linear_conv_kernel_dim": 4}
    config = Qwen3NextConfig(hidden_size=D, num_hidden_layers=1, rms_norm_eps=1e-5, vocab_size=2, **sizes)
    theirs, ours = qwen.Qwen3NextGatedDeltaNet(config, 0), randomised(GatedDeltaNet)
    p = jax.tree.map(np.float32, numbers(nnx.state(ours)))

    def by_head(*kernels):
        """The rows of several projections, head by head."""
        return np.concatenate([kernel.T.reshape(H, -1, D) for kernel in kernels], axis=1).reshape(-1, D)

    order = ("query", "key", "value")
    weights = {
        "in_proj_qkvz.weight": by_head(*(p["inputs"][name]["kernel"] for name in order), p["gate"]["kernel"]),
        "in_proj_ba.weight": by_head(p["beta"]["kernel"], p["decay"]["kernel"]),
        "conv1d.weight": np.concatenate([p["convolutions"][name]["kernel"].T for name in order])[:, None],
        "dt_bias": p["decay_bias"],
        "A_log": p["a_log"],
        "norm.weight": p["norm"]["scale"],
        "out_proj.weight": p["out"]["kernel"].T,
    }
    theirs.load_state_dict({name: torch.tensor(np.array(array)) for name, array in weights.items()})
    with torch.no_grad():
        reference = theirs(torch.tensor(np.float32(x))).numpy()
    np.testing.assert_allclose(ours(jnp.float32(x)), reference, rtol=0, atol=ROUNDING * abs(reference).max())


def test_decays_start_as_in_mamba_2():
    mixer = GatedDeltaNet(2048, heads=1024, rngs=nnx.Rngs(0))
    rate, step = np.exp(mixer.a_log[...]), np.log1p(np.exp(np.float64(mixer.decay_bias[...])))
    # of 1024 numbers uniform on an interval the mean is off by .009 of its length (3 deviations: .027)
    assert rate.min() > 0
    assert rate.max() <= 16
    assert abs(rate.mean() / 16 - 0.5) < 0.03
    place = np.log(step / 1e-3) / np.log(100)
    assert place.min() > -1e-3
    assert place.max() < 1 + 1e-3
    assert abs(place.mean() - 0.5) < 0.03


@NETS
def test_a_memory_may_be_reflected_only_where_eigenvalues_may_be_negative(kind):
    for eigenvalue_range, sign in (((0, 1), 1), ((-1, 1), -1)):
        mixer = kind(D, heads=H, eigenvalue_range=eigenvalue_range, rngs=nnx.Rngs(0))
        # every token writes nothing under the same key, with all its might, and reads there
        for name, kernel in (("query", 1.0), ("key", 1.0), ("value", 0.0)):
            mixer.inputs[name].kernel[...] = jnp.full((D, D), kernel)
            mixer.convolutions[name].kernel[...] = jnp.zeros((4, D)).at[-1].set(1.0)
        mixer.beta.kernel[...] = jnp.full((D, H), 1.0 if sign == -1 else 0.1)
        mixer.out.kernel[...] = jnp.eye(D)
        if kind is GatedDeltaNet:
            mixer.gate.kernel[...] = jnp.ones((D, D))
        state = mixer.init_state(B, T)
        state["memory"] = jnp.ones_like(state["memory"])
        y = np.asarray(mixer.prefill(state, jnp.ones((B, T, D)))[1])
        first = np.sign(y[0, 0, 0])
        assert first != 0
        assert (np.sign(y) == first * float(sign) ** np.arange(T)[None, :, None]).all()


@NETS
def test_what_decays_the_memory_is_a_recurrence(kind):
    mixer = kind(D, heads=H, rngs=nnx.Rngs(0))
    state = nnx.to_flat_state(nnx.state(mixer))
    own = {path[0] for path, param in state if isinstance(param, Recurrence)}
    assert own == ({"a_log", "decay_bias"} if kind is GatedDeltaNet else set())


@NETS
@pytest.mark.parametrize("heads", [0, 5, 24])
def test_heads_that_do_not_divide_the_width_are_refused(kind, heads):
    with pytest.raises(
        ValueError,
        match=rf"model\.width=12 cannot be split into model\.heads={heads}; heads that fit: \[1, 2, 3, 4, 6, 12\]",
    ):
        kind(12, heads=heads, rngs=nnx.Rngs(0))


@NETS
def test_other_ranges_of_eigenvalues_are_refused(kind):
    with pytest.raises(ValueError, match=r"eigenvalue_range=\[0, 2\] is unknown; use \[0,1\] or \[-1,1\]"):
        kind(D, heads=H, eigenvalue_range=[0, 2], rngs=nnx.Rngs(0))


@NETS
def test_in_bfloat16_states_stay_float32_and_outputs_come_near_those_in_float32(kind, x):
    mixer = randomised(kind)
    reference = np.asarray(mixer(jnp.float32(x)))
    graph, own, params = nnx.split(mixer, Recurrence, ...)
    mixer = nnx.merge(graph, own, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    state, y = mixer.prefill(mixer.init_state(B, T), jnp.bfloat16(x))
    assert (state["memory"].dtype, y.dtype) == (jnp.float32, jnp.bfloat16)
    # 2^-8 on each of inputs, weights and projections, a few times over, and more where a norm divides by little
    assert np.linalg.norm(np.float32(y) - reference) <= 0.1 * np.linalg.norm(reference)
