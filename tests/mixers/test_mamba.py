"""Mamba and Mamba-2 against loops in float64 and Hugging Face with copied weights, and their starting values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from seqlab.mixers.base import Recurrence
from seqlab.mixers.mamba import Mamba, Mamba2
from seqlab.types import Places

B, T, D, N = 2, 11, 20, 3  # D above 16: a step of rank 2
SIZES = {Mamba: {"state_size": N}, Mamba2: {"state_size": N, "heads": 4, "groups": 2}}
KINDS = {
    "mamba": (Mamba, SIZES[Mamba]),
    "mamba_negative": (Mamba, SIZES[Mamba] | {"eigenvalue_range": [-1, 1]}),
    "mamba2": (Mamba2, SIZES[Mamba2]),
}
# sums of at most forty products three deep over eleven steps: some 300 roundings of 2^-24, relative to the largest
# number; seen 1e-6
TOLERANCE = 2e-5


def randomised(kind, **options):
    mixer = kind(D, **options, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.4 * jax.random.normal(keys(), param.shape)
    return mixer


def numbers(mixer):
    return jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(mixer, nnx.Param)))


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def convolved(p, x):
    """x [T, E], zeros before it."""
    size = len(p["kernel"])
    padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
    return np.stack([(p["kernel"] * padded[t : t + size]).sum(0) + p["bias"] for t in range(len(x))])


def mamba(p, x, negative=False):
    """One sequence [T, D], channel by channel and token by token."""
    u = silu(convolved(p["convolution"], x @ p["inputs"]["kernel"]))
    y = np.zeros_like(u)
    h = np.zeros((u.shape[1], N))
    for t in range(len(x)):
        selected = u[t] @ p["select"]["kernel"]
        r, b, c = selected[: -2 * N], selected[-2 * N : -N], selected[-N:]
        delta = softplus(r @ p["delta"] + p["delta_bias"])
        for e in range(u.shape[1]):
            for n in range(N):
                decay = np.exp(-delta[e] * np.exp(p["a_log"][n, e]))
                decay = 2 * decay - 1 if negative else decay
                h[e, n] = decay * h[e, n] + delta[e] * b[n] * u[t, e]
            y[t, e] = h[e] @ c + p["d"][e] * u[t, e]
    return (y * silu(x @ p["gate"]["kernel"])) @ p["out"]["kernel"]


def mamba2(p, x):
    """One sequence [T, D], head by head and token by token."""
    heads, groups = (SIZES[Mamba2][name] for name in ("heads", "groups"))
    inner = len(p["scale"])
    mixed = silu(convolved(p["convolution"], x @ p["inputs"]["kernel"]))
    gate, delta = x @ p["gate"]["kernel"], softplus(x @ p["delta"]["kernel"] + p["delta_bias"])
    y = np.zeros((len(x), inner))
    for head in range(heads):
        here = slice(head * inner // heads, (head + 1) * inner // heads)
        group = head * groups // heads
        first = inner + group * N
        memory = np.zeros((N, inner // heads))
        for t in range(len(x)):
            u, b = mixed[t, here], mixed[t, first : first + N]
            c = mixed[t, first + groups * N : first + (groups + 1) * N]
            memory = np.exp(-delta[t, head] * np.exp(p["a_log"][head])) * memory + np.outer(b, delta[t, head] * u)
            y[t, here] = c @ memory + p["d"][head] * u
    gated = (y * silu(gate)).reshape(len(x), groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5)
    return (normed.reshape(y.shape) * p["scale"]) @ p["out"]["kernel"]


FORMULAS = {"mamba": mamba, "mamba_negative": partial(mamba, negative=True), "mamba2": mamba2}


def close(actual, reference):
    reference = np.asarray(reference)
    np.testing.assert_allclose(actual, reference, atol=TOLERANCE * np.abs(reference).max(), rtol=0)


@pytest.mark.parametrize("scan", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients_are_those_of_the_loop(name, scan):
    kind, options = KINDS[name]
    mixer = randomised(kind, **options, scan=scan, chunk=4)
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

    def formula(step=0.0):
        moved = jax.tree.map(lambda p, way: p + step * way, numbers(mixer), numbers(nnx.merge(graph, along)))
        return np.stack([FORMULAS[name](moved, row) for row in np.float64(x) + step * np.float64(along_x)])

    y, slope = outputs_and_slope(params, jnp.asarray(x))
    close(y, formula())
    # a central difference with step s is wrong by s^2 of the third derivative and by 1e-15 / s, far less than rounding
    difference = ((formula(1e-5) - formula(-1e-5)) * readout).sum() / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=TOLERANCE)


@pytest.mark.parametrize("name", KINDS)
def test_packed_sequences_and_any_split_are_those_of_the_loop(name):
    kind, options = KINDS[name]
    mixer = randomised(kind, **options, chunk=4)
    x = np.random.default_rng(1).normal(size=(1, T, D)).astype(np.float32)
    reference = np.concatenate([FORMULAS[name](numbers(mixer), np.float64(part)) for part in (x[0, :5], x[0, 5:])])
    segments = jnp.array([[1] * 5 + [2] * 6])
    close(jax.jit(mixer)(jnp.asarray(x), Places.of(segments))[0], reference)
    alone = FORMULAS[name](numbers(mixer), np.float64(x[0]))
    prefill = jax.jit(mixer.prefill)
    for split in (0, 5, T):
        state, before = prefill(mixer.init_state(1, T), jnp.asarray(x[:, :split]))
        _, after = prefill(state, jnp.asarray(x[:, split:]))
        close(jnp.concatenate([before, after], axis=1)[0], alone)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="the reference is Hugging Face: pip install 'seqlab[parity]'")
    return pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")


def hugging_face_mamba(torch, p):
    """The mixer and where each of its parameters stands in seqlab."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=D, state_size=N, num_hidden_layers=1, vocab_size=2)
    return MambaMixer(config, 0), {
        "in_proj.weight": np.concatenate([p["inputs"]["kernel"], p["gate"]["kernel"]], 1).T,
        "conv1d.weight": p["convolution"]["kernel"].T[:, None],
        "conv1d.bias": p["convolution"]["bias"],
        "x_proj.weight": p["select"]["kernel"].T,
        "dt_proj.weight": p["delta"].T,
        "dt_proj.bias": p["delta_bias"],
        "A_log": p["a_log"].T,
        "D": p["d"],
        "out_proj.weight": p["out"]["kernel"].T,
    }


def hugging_face_mamba2(torch, p):
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = SIZES[Mamba2]
    config = Mamba2Config(
        hidden_size=D,
        state_size=N,
        num_heads=sizes["heads"],
        head_dim=2 * D // sizes["heads"],
        n_groups=sizes["groups"],
        chunk_size=4,
        num_hidden_layers=1,
        vocab_size=2,
    )
    return Mamba2Mixer(config, 0), {
        "in_proj.weight": np.concatenate([p[part]["kernel"] for part in ("gate", "inputs", "delta")], 1).T,
        "conv1d.weight": p["convolution"]["kernel"].T[:, None],
        "conv1d.bias": p["convolution"]["bias"],
        "dt_bias": p["delta_bias"],
        "A_log": p["a_log"],
        "D": p["d"],
        "norm.weight": p["scale"],
        "out_proj.weight": p["out"]["kernel"].T,
    }


@pytest.mark.parametrize("kind", SIZES)
def test_outputs_and_gradients_are_those_of_hugging_face(torch, kind):
    convert = {Mamba: hugging_face_mamba, Mamba2: hugging_face_mamba2}[kind]
    mixer = randomised(kind, **SIZES[kind], chunk=4)
    rng = np.random.default_rng(0)
    x, readout = (rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))
    theirs, copied = convert(torch, numbers(mixer))
    theirs.load_state_dict({name: torch.tensor(np.float32(array)) for name, array in copied.items()})
    theirs.eval()
    torch_x = torch.tensor(x, requires_grad=True)
    torch_y = theirs(torch_x)
    (torch_y * torch.tensor(readout)).sum().backward()

    graph, params = nnx.split(mixer)

    @jax.jit
    def with_gradients(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, *pull(jnp.asarray(readout))

    y, by_param, by_x = with_gradients(params, x)
    close(y, torch_y.detach())
    close(by_x, torch_x.grad)
    _, gradients = convert(torch, numbers(nnx.merge(graph, by_param)))
    for name, param in theirs.named_parameters():
        close(gradients[name], param.grad)


def test_mamba_starts_as_its_authors_say():
    mixer = Mamba(2048, expand=2, rngs=nnx.Rngs(0))
    p = numbers(mixer)
    # float32 holds log(n) to 6e-8, and n to some n log(n) times as much
    np.testing.assert_allclose(np.exp(p["a_log"]), np.broadcast_to(np.arange(1, 17)[:, None], (16, 4096)), rtol=1e-6)
    # one fixed seed; a right start fails with probability 1e-4
    steps = stats.uniform(np.log(1e-3), np.log(1e-1) - np.log(1e-3))
    assert stats.kstest(np.log(softplus(p["delta_bias"])), steps.cdf).pvalue > 1e-4
    rank = 2048 // 16
    spread = stats.uniform(-(rank**-0.5), 2 * rank**-0.5)
    assert p["delta"].shape == (rank, 4096)
    assert stats.kstest(p["delta"][:4].ravel(), spread.cdf).pvalue > 1e-4
    assert (p["d"] == 1).all()


def test_mamba2_starts_as_its_authors_say():
    p = numbers(Mamba2(1024, heads=2048, state_size=1, rngs=nnx.Rngs(0)))
    # one fixed seed; a right start fails each with probability 1e-4
    assert stats.kstest(np.exp(p["a_log"]), stats.uniform(1, 15).cdf).pvalue > 1e-4
    steps = stats.uniform(np.log(1e-3), np.log(1e-1) - np.log(1e-3))
    assert stats.kstest(np.log(softplus(p["delta_bias"])), steps.cdf).pvalue > 1e-4
    assert (p["d"] == 1).all()
    assert (p["scale"] == 1).all()


@pytest.mark.parametrize("kind", SIZES)
def test_rates_and_steps_belong_to_the_recurrence_and_nothing_else_does(kind):
    leaves = nnx.to_flat_state(nnx.state(kind(D, **SIZES[kind], rngs=nnx.Rngs(0))))
    assert {path for path, param in leaves if isinstance(param, Recurrence)} == {("a_log",), ("delta_bias",)}


@pytest.mark.parametrize("wrong", [[0, 2], [-1, 0], [1, -1], [-1, 1, 1]])
def test_an_unknown_range_of_eigenvalues_is_named(wrong):
    with pytest.raises(ValueError, match=r"eigenvalue_range=\[.*\] is unknown; use \[0,1\] or \[-1,1\]"):
        Mamba(D, eigenvalue_range=wrong, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Mamba, {"state_size": 0}, "state_size=0 must be at least 1"),
        (Mamba, {"expand": 0}, "expand=0 must be at least 1"),
        (Mamba, {"chunk": 0}, "chunk=0 must be at least 1"),
        (Mamba, {"convolution": 0}, "a convolution over 0 tokens"),
        (Mamba2, {"groups": 0}, "groups=0 must be at least 1"),
        (Mamba2, {"heads": 3}, r"2 x model\.width=40 cannot be split into model\.heads=3"),
        (Mamba2, {"heads": 4, "groups": 3}, "model.heads=4 cannot share groups=3"),
    ],
)
def test_sizes_that_leave_nothing_or_do_not_divide_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(D, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", SIZES)
def test_an_unknown_scan_is_named(kind):
    with pytest.raises(ValueError, match="scan=wild is unknown"):
        kind(D, scan="wild", rngs=nnx.Rngs(0))(jnp.ones((1, 2, D)))


def test_a_mamba_with_negative_eigenvalues_can_turn_its_state_over():
    """Parity needs a decay of -1 (Grazzi et al. 2025): a large step gives it, and 0 with the usual range."""
    for eigenvalues, expected in (((0, 1), 0.0), ((-1, 1), -1.0)):
        mixer = Mamba(D, state_size=N, eigenvalue_range=eigenvalues, rngs=nnx.Rngs(0))
        one = jnp.ones((1, N, 2 * D))
        drive = (jnp.full((1, 1, 2 * D), 200.0), jnp.zeros((1, 1, 2 * D)), jnp.ones((1, 1, N)), jnp.ones((1, 1, N)))
        assert (mixer.scanned(one, drive, None)[0] == expected).all()


def test_the_backward_pass_of_the_sequential_form_keeps_no_more_states_than_a_chunk_has():
    length, states = 1024, 64
    graph, params = nnx.split(Mamba(16, state_size=states, scan="sequential", chunk=32, rngs=nnx.Rngs(0)))
    loss = jax.grad(lambda params, x: nnx.merge(graph, params)(x).sum())
    compiled = jax.jit(loss).lower(params, jnp.ones((1, length, 16))).compile()
    of_all_states = 4 * length * states * 32
    # what else there is, the streams, takes half of that; with all states kept it is more than three times that
    assert compiled.memory_analysis().temp_size_in_bytes < of_all_states
