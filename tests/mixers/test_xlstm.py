"""sLSTM and mLSTM against loops over their formulas, with and without a stabiliser, and Hugging Face's xLSTM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.mixers.base import Recurrence
from seqlab.mixers.xlstm import MLSTM, SLSTM
from seqlab.model import compute_in

B, T, D, H, N = 2, 9, 5, 2, 6
K = N // H
# nine steps of sums of ten products of numbers of a few units, some 200 roundings of 2^-24, and a norm that divides by
# a deviation of a tenth or more
ATOL = 5e-4
KINDS = (SLSTM, MLSTM)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def randomised(kind, scale=0.5, **options):
    mixer = kind(D, state_size=N, heads=H, rngs=nnx.Rngs(0), **options)
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] += scale * jax.random.normal(keys(), param.shape)
    return mixer


def numbers(tree):
    """A mixer's parameters, or anything of their shape, as float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(tree))


def drawn(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D)).astype(np.float32)


def linear(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def heads(x):
    return x.reshape(*x.shape[:-1], H, K)


def normalised(params, h):
    h = (h - h.mean(axis=-1, keepdims=True)) / np.sqrt(h.var(axis=-1, keepdims=True) + 1e-5)
    return h.reshape(*h.shape[:-2], N) * params["scale"]


def slstm(params, x, stabilised):
    drive = {gate: heads(linear(part, x)) for gate, part in params["inputs"].items()}
    h = c = n = np.zeros((B, H, K))
    m, states = np.full((B, H, K), -np.inf), []
    for t in range(T):
        u = {g: drive[g][:, t] + np.einsum("BHK,HKJ->BHJ", h, r) for g, r in params["recurrent"].items()}
        if stabilised:
            kept = np.log(sigmoid(u["forget"])) + m
            m = np.maximum(kept, u["input"])
            f, i = np.exp(kept - m), np.exp(u["input"] - m)
        else:
            f, i = sigmoid(u["forget"]), np.exp(u["input"])
        c = f * c + i * np.tanh(u["cell"])
        n = f * n + i
        h = sigmoid(u["output"]) * c / n
        states.append(h)
    return linear(params["out"], normalised(params["norm"], np.stack(states, axis=1)))


def mlstm(params, x, stabilised):
    seen = x
    if "convolution" in params:
        kernel, padded = params["convolution"]["kernel"], np.pad(x, ((0, 0), (3, 0), (0, 0)))
        seen = sum(kernel[i] * padded[:, i : i + T] for i in range(4)) + params["convolution"]["bias"]
        seen = seen * sigmoid(seen)
    q, k = (heads(linear(params[name], seen)) for name in ("query", "key"))
    v, o = heads(linear(params["value"], x)), sigmoid(linear(params["output_gate"], x))
    log_i, log_f = linear(params["input_gate"], x), -np.logaddexp(0, -linear(params["forget_gate"], x))
    memory, n, m, states = np.zeros((B, H, K, K)), np.zeros((B, H, K)), np.zeros((B, H)), []
    for t in range(T):
        if stabilised:
            kept = log_f[:, t] + m
            m = np.maximum(kept, log_i[:, t])
            f, i = np.exp(kept - m), np.exp(log_i[:, t] - m)
        else:
            f, i = np.exp(log_f[:, t]), np.exp(log_i[:, t])
        key = k[:, t] / np.sqrt(K)
        memory = f[..., None, None] * memory + i[..., None, None] * np.einsum("BHW,BHK->BHWK", v[:, t], key)
        n = f[..., None] * n + i[..., None] * key
        read = np.einsum("BHWK,BHK->BHW", memory, q[:, t])
        weight = np.abs(np.einsum("BHK,BHK->BH", n, q[:, t]))
        with np.errstate(over="ignore"):
            states.append(read / (np.maximum(weight, np.exp(-m)) + 1e-6 * stabilised)[..., None])
    return linear(params["out"], o * normalised(params["norm"], np.stack(states, axis=1)))


LOOPS = {SLSTM: slstm, MLSTM: mlstm}
# the associative form last: its gradient is that of the chunked one
VARIANTS = [(SLSTM, {})] + [
    (MLSTM, {"scan": scan, "chunk": 4, "convolution": size})
    for scan, size in (("sequential", 4), ("chunked", 0), ("associative", 4))
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_it_is_a_loop_over_its_formula(kind, options):
    mixer = randomised(kind, **options)
    expected = LOOPS[kind](numbers(nnx.state(mixer)), drawn(), stabilised=False)
    np.testing.assert_allclose(jax.jit(mixer)(jnp.asarray(drawn())), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("direction", [-1, 1])
@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_gates_that_would_overflow_are_those_of_a_stabilised_loop(kind, options, direction):
    mixer = randomised(kind, **options)
    gates = mixer.inputs if kind is SLSTM else {"input": mixer.input_gate, "forget": mixer.forget_gate}
    gates["input"].kernel[...] *= 300.0  # exp(1000) is no number
    gates["forget"].kernel[...] *= 10.0
    gates["forget"].bias[...] *= 20.0 * direction
    x, params = drawn(), numbers(nnx.state(mixer))
    assert np.abs(linear(params["inputs"]["input"] if kind is SLSTM else params["input_gate"], x)).max() > 500
    expected = LOOPS[kind](params, x, stabilised=True)
    # a logit of a thousand is rounded by 6e-5, and so large is the share by which its exponential is off
    np.testing.assert_allclose(jax.jit(mixer)(jnp.asarray(x)), expected, atol=5 * ATOL, rtol=0)


@pytest.mark.parametrize(("kind", "options"), VARIANTS[:3])
def test_gradients_are_the_slopes_of_the_loop(kind, options):
    graph, params = nnx.split(randomised(kind, **options))
    x, readout = drawn(), drawn(1)

    def value(params, x):
        return jnp.sum(nnx.merge(graph, params)(x) * readout)

    gradient = jax.jit(jax.grad(value, argnums=(0, 1)))(params, jnp.asarray(x))
    gradient = jax.tree.leaves((numbers(gradient[0]), np.float64(gradient[1])))
    leaves, tree = jax.tree.flatten((numbers(params), np.float64(x)))
    rng, step = np.random.default_rng(2), 1e-5
    largest = max(np.linalg.norm(leaf) for leaf in gradient)
    for i, leaf in enumerate(leaves):  # along a random direction in each
        direction = rng.normal(size=leaf.shape)

        def moved(by, i=i, direction=direction):
            params, x = tree.unflatten([*leaves[:i], leaves[i] + by * direction, *leaves[i + 1 :]])
            return np.sum(LOOPS[kind](params, x, stabilised=False) * readout)

        # the difference is off by its step squared, 1e-10, and by 1e-16 of the value over the step, 1e-9; where all
        # input gates grow alike the outputs hardly change: what is left there is of the size of other gradients
        slope = (moved(step) - moved(-step)) / (2 * step)
        scale = np.linalg.norm(direction) * (np.linalg.norm(gradient[i]) + 0.01 * largest)
        assert abs(np.sum(gradient[i] * direction) - slope) <= ATOL * scale


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_an_mlstm_is_that_of_hugging_face(mode):
    reason = "the reference is Hugging Face's xLSTM: pip install 'seqlab[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    xlstm = pytest.importorskip("transformers.models.xlstm.modeling_xlstm", reason=reason)
    from transformers import xLSTMConfig

    length, size = 12, 128  # which Hugging Face rounds up to a multiple of 64
    # gates are capped there, by 1e6 tanh(gate / 1e6): off by 1e-11 and a few roundings
    config = xLSTMConfig(
        hidden_size=size, num_heads=H, num_hidden_layers=1, qk_dim_factor=1.0, chunk_size=4, mode=mode,
        norm_eps=1e-5, gate_soft_cap=1e6,
    )  # fmt: skip
    layer = xlstm.xLSTMLayer(config)
    mixer = MLSTM(size, heads=H, convolution=0, scan="chunked", chunk=5, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for gate in (mixer.input_gate, mixer.forget_gate):
        gate.kernel[...] = 0.2 * jax.random.normal(keys(), gate.kernel.shape)
    mixer.norm.scale[...] = jax.random.normal(keys(), mixer.norm.scale.shape)
    pairs = {
        "q": mixer.query, "k": mixer.key, "v": mixer.value, "ogate_preact": mixer.output_gate,
        "igate_preact": mixer.input_gate, "fgate_preact": mixer.forget_gate, "out_proj": mixer.out,
    }  # fmt: skip

    def to_torch(param):
        return torch.tensor(np.asarray(param[...]))

    with torch.no_grad():
        for name, part in pairs.items():
            getattr(layer, name).weight.copy_(to_torch(part.kernel).T)
            if getattr(layer, name).bias is not None:
                getattr(layer, name).bias.copy_(to_torch(part.bias))
        layer.multihead_norm.weight.copy_(to_torch(mixer.norm.scale))
    rng = np.random.default_rng(0)
    x, readout = (rng.normal(size=(B, length, size)).astype(np.float32) for _ in range(2))
    torch_x = torch.tensor(x, requires_grad=True)
    torch_y, torch_state = layer(torch_x)
    (torch_y * torch.tensor(readout)).sum().backward()

    graph, params = nnx.split(mixer)

    @jax.jit
    def with_gradients(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, *pull(jnp.asarray(readout))

    y, by_param, by_x = with_gradients(params, x)
    state, _ = mixer.prefill(mixer.init_state(B, length), jnp.asarray(x))
    names = dict(zip(pairs, ("query", "key", "value", "output_gate", "input_gate", "forget_gate", "out"), strict=True))
    compared = [(y, torch_y.detach()), (by_x, torch_x.grad), (by_param["norm"]["scale"][...],
                layer.multihead_norm.weight.grad)]  # fmt: skip
    memory = 8 * state["memory"]  # Hugging Face divides the queries by sqrt(64) in place of the keys
    states = (memory[..., :-1], memory[..., -1], state["log_scale"][..., None])
    compared += [(ours, theirs.detach()) for ours, theirs in zip(states, torch_state, strict=True)]
    compared += [(by_param[ours]["kernel"][...].T, getattr(layer, name).weight.grad) for name, ours in names.items()]
    for actual, reference in compared:
        # sums of 128 products and a norm: a thousand roundings of 2^-24 of the largest number
        np.testing.assert_allclose(actual, reference, atol=1e-4 * max(1, float(abs(reference).max())), rtol=0)


def test_a_first_token_is_read_however_closed_its_gate():
    # c / n = tanh(z) for any input gate; the first scale is the token's own and not that of an empty memory
    mixer = SLSTM(D, state_size=N, heads=H, rngs=nnx.Rngs(0))
    empty = mixer.init_state(1, 1)
    gates = {gate: jnp.full((1, H, K), 0.3) for gate in mixer.gates} | {"input": jnp.full((1, H, K), -1e4)}
    hidden = mixer.advance(empty, gates)["hidden"]
    np.testing.assert_allclose(hidden, np.full((1, H, K), sigmoid(0.3) * np.tanh(0.3)), rtol=1e-6)


@pytest.mark.parametrize(("kind", "options"), VARIANTS[:3])
def test_extreme_inputs_give_finite_outputs_and_gradients(kind, options):
    graph, params = nnx.split(randomised(kind, **options))

    @jax.jit
    def with_gradients(params, x):
        return jax.value_and_grad(lambda params, x: nnx.merge(graph, params)(x).sum(), argnums=(0, 1))(params, x)

    for size in (1e4, -1e4, 1e-40, 0.0):
        for leaf in jax.tree.leaves(with_gradients(params, jnp.asarray(drawn()) * size)):
            assert jnp.isfinite(leaf).all()


@pytest.mark.parametrize(("kind", "options"), VARIANTS[:3])
def test_bfloat16_inputs_run_through_a_float32_state(kind, options):
    graph, params = nnx.split(randomised(kind, **options))
    mixer = nnx.merge(graph, compute_in(jnp.dtype("bfloat16"), params))
    state, y = mixer.prefill(mixer.init_state(B, T), jnp.asarray(drawn(), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for name, leaf in state.items() if name != "inputs")
    assert all(len(leaf) == B for leaf in jax.tree.leaves(state))


def test_memories_start_long_and_blind_to_the_token():
    slstm, mlstm = (kind(D, state_size=N, heads=H, rngs=nnx.Rngs(0)) for kind in KINDS)
    assert slstm.inputs["forget"].bias[...].tolist() == [3.0, 4.5, 6.0] * H
    assert all((matrix[...] == 0).all() and isinstance(matrix, Recurrence) for matrix in slstm.recurrent.values())
    assert {gate for gate, part in slstm.inputs.items() if part.bias is None} == {"input"}
    assert mlstm.forget_gate.bias[...].tolist() == [3.0, 6.0]
    assert all((gate.kernel[...] == 0).all() for gate in (mlstm.input_gate, mlstm.forget_gate))


def test_input_gates_start_at_random():
    bias = MLSTM(2, state_size=8192, heads=4096, rngs=nnx.Rngs(0)).input_gate.bias[...]
    # one fixed seed; a right start fails with probability 1e-4
    assert stats.kstest(np.asarray(bias), stats.norm(0, 0.1).cdf).pvalue > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_as_wide_as_the_stream_where_nothing_is_said(kind):
    state = kind(8, heads=2, rngs=nnx.Rngs(0)).init_state(3, 1)
    shapes = {"memory": (3, 2, 4, 5), "log_scale": (3, 2), "inputs": (3, 3, 8)}  # values, and the normaliser
    if kind is SLSTM:
        shapes = dict.fromkeys(("hidden", "cell", "normaliser", "log_scale"), (3, 2, 4))
    assert {name: leaf.shape for name, leaf in state.items()} == shapes


@pytest.mark.parametrize("heads", [0, 4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_cannot_share_the_state_are_refused(kind, heads):
    message = r"^model\.heads=6 leaves a head one of model\.state_size=6 numbers; use fewer heads$"
    if heads != 6:
        message = rf"^model\.state_size=6 cannot be split into model\.heads={heads}; heads that fit: \[1, 2, 3, 6\]$"
    with pytest.raises(ValueError, match=message):
        kind(D, state_size=6, heads=heads, rngs=nnx.Rngs(0))
