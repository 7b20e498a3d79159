"""minGRU and minLSTM against loops over their formulas and the paper's scan over logarithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.minimal import MinGRU, MinLSTM
from seqlab.model import compute_in

B, T, D, N = 2, 11, 5, 4
# eleven steps of sums of six products of numbers of a few units: some 200 roundings of 2^-24, of the largest number
ATOL = 5e-5
KINDS = (MinGRU, MinLSTM)
RANGES = ((0, 1), (-1, 1))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def positive(x):
    return np.where(x >= 0, x + 0.5, sigmoid(x))


def randomised(kind, **options):
    mixer = kind(D, state_size=N, rngs=nnx.Rngs(0), **options)
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.7 * jax.random.normal(keys(), param.shape)
    return mixer


def numbers(tree):
    """A mixer's parameters, or anything of their shape, as float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(tree))


def linear(params, x):
    return x @ params["kernel"] + params["bias"]


def drawn(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D)).astype(np.float32)


def loop(kind, params, x, eigenvalue_range=(0, 1)):
    drive = {name: linear(part, x) for name, part in params["inputs"].items()}
    h, states = np.zeros((B, N)), []
    for t in range(T):
        u = {name: part[:, t] for name, part in drive.items()}
        if kind is MinGRU:
            z = sigmoid(u["update"])
            decay, write = 1 - z, z
        else:
            f, i = sigmoid(u["forget"]), sigmoid(u["input"])
            decay, write = f / (f + i), i / (f + i)
        if eigenvalue_range == (-1, 1):
            decay = 2 * decay - 1
        h = decay * h + write * positive(u["new"])
        states.append(h)
    return linear(params["out"], np.stack(states, axis=1))


@pytest.mark.parametrize("scan", ["sequential", "associative", "chunked"])
@pytest.mark.parametrize("eigenvalue_range", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_loop_over_its_formula(kind, eigenvalue_range, scan):
    mixer = randomised(kind, eigenvalue_range=eigenvalue_range, scan=scan, chunk=3)
    expected = loop(kind, numbers(nnx.state(mixer)), drawn(), eigenvalue_range)
    np.testing.assert_allclose(jax.jit(mixer)(jnp.asarray(drawn())), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_scan_over_logarithms_of_the_paper(kind):
    # log h_t = A_t + log sum_{s <= t} exp(log b_s - A_s) with A_t = sum_{s <= t} log a_s (Heinsen 2023); gates as in
    # Feng et al. 2024, app. B
    mixer = randomised(kind)
    params = numbers(nnx.state(mixer))
    drive = {name: linear(part, drawn()) for name, part in params["inputs"].items()}
    if kind is MinGRU:
        log_a, log_write = -np.logaddexp(0, drive["update"]), -np.logaddexp(0, -drive["update"])
    else:
        difference = np.logaddexp(0, -drive["forget"]) - np.logaddexp(0, -drive["input"])
        log_a, log_write = -np.logaddexp(0, difference), -np.logaddexp(0, -difference)
    total = np.cumsum(log_a, axis=1)
    log_b = log_write + np.log(positive(drive["new"]))
    states = np.exp(total + np.logaddexp.accumulate(log_b - total, axis=1))
    np.testing.assert_allclose(mixer(jnp.asarray(drawn())), linear(params["out"], states), atol=ATOL, rtol=0)


@pytest.mark.parametrize("eigenvalue_range", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_slopes_of_the_loop(kind, eigenvalue_range):
    graph, params = nnx.split(randomised(kind, eigenvalue_range=eigenvalue_range))
    x, readout = drawn(), drawn(1)

    def value(params, x):
        return jnp.sum(nnx.merge(graph, params)(x) * readout)

    gradient = jax.jit(jax.grad(value, argnums=(0, 1)))(params, jnp.asarray(x))
    leaves, tree = jax.tree.flatten((numbers(params), np.float64(x)))
    gradient = jax.tree.leaves((numbers(gradient[0]), np.float64(gradient[1])))
    rng, step = np.random.default_rng(2), 1e-5
    for i, leaf in enumerate(leaves):  # along a random direction in each
        direction = rng.normal(size=leaf.shape)

        def moved(by, i=i, direction=direction):
            new_params, new_x = tree.unflatten([*leaves[:i], leaves[i] + by * direction, *leaves[i + 1 :]])
            return np.sum(loop(kind, new_params, new_x, eigenvalue_range) * readout)

        # the difference is off by its step squared, 1e-10, and by 1e-16 of the value over the step, 1e-9
        slope = (moved(step) - moved(-step)) / (2 * step)
        scale = np.linalg.norm(gradient[i]) * np.linalg.norm(direction)
        assert abs(np.sum(gradient[i] * direction) - slope) <= ATOL * scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_that_hardly_writes_still_writes(kind):
    # 1 - s(20) is 0 in float32 and s(-20) is 2e-9
    mixer = kind(1, rngs=nnx.Rngs(0))
    drive = dict.fromkeys(mixer.inputs, jnp.zeros((1, 1)))
    drive |= {"update": jnp.full((1, 1), -20.0)} if kind is MinGRU else {"input": jnp.full((1, 1), -20.0)}
    _, write = mixer.coefficients(drive)
    z = sigmoid(-20.0) if kind is MinGRU else sigmoid(-20.0) / (sigmoid(-20.0) + 0.5)
    # five functions, the logit of 20 exact to 2^-24 * 20 and so the gate to as large a share
    assert abs(float(write[0, 0]) / (z * 0.5) - 1) < 5e-6


def test_two_closed_gates_share_equally():
    # f / (f + i) is 0 / 0 as a quotient
    mixer = MinLSTM(1, rngs=nnx.Rngs(0))
    drive = {"forget": jnp.full((1, 1), -1e4), "input": jnp.full((1, 1), -1e4), "new": jnp.zeros((1, 1))}
    assert [float(part[0, 0]) for part in mixer.coefficients(drive)] == [0.5, 0.25]


@pytest.mark.parametrize("eigenvalue_range", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_inputs_give_finite_outputs_and_gradients(kind, eigenvalue_range):
    graph, params = nnx.split(randomised(kind, eigenvalue_range=eigenvalue_range, scan="associative"))

    @jax.jit
    def with_gradients(params, x):
        return jax.value_and_grad(lambda params, x: nnx.merge(graph, params)(x).sum(), argnums=(0, 1))(params, x)

    for size in (1e4, -1e4, 1e-40):
        for leaf in jax.tree.leaves(with_gradients(params, jnp.asarray(drawn()) * size)):
            assert jnp.isfinite(leaf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_inputs_run_through_a_float32_state(kind):
    graph, params = nnx.split(randomised(kind))
    mixer = nnx.merge(graph, compute_in(jnp.dtype("bfloat16"), params))
    state, y = mixer.prefill(mixer.init_state(B, T), jnp.asarray(drawn(), jnp.bfloat16))
    assert state.shape == (B, N) and state.dtype == jnp.float32
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_as_wide_as_the_stream_where_nothing_is_said(kind):
    assert kind(D, rngs=nnx.Rngs(0)).init_state(3, 1).shape == (3, D)


@pytest.mark.parametrize("eigenvalue_range", [[0, 2], (1, -1), [0], (-1.0, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_another_range_is_refused(kind, eigenvalue_range):
    numbers = ", ".join(map(str, eigenvalue_range))
    message = rf"^model\.eigenvalue_range=\[{numbers}\] is unknown; use \[0,1\] or \[-1,1\]$"
    with pytest.raises(ValueError, match=message):
        kind(D, eigenvalue_range=eigenvalue_range, rngs=nnx.Rngs(0))


def test_the_scan_is_the_one_asked_for():
    with pytest.raises(ValueError, match="scan=fast is unknown"):
        MinGRU(D, scan="fast", rngs=nnx.Rngs(0))(jnp.ones((1, 2, D)))
    with pytest.raises(ValueError, match="chunk=0"):
        MinLSTM(D, chunk=0, rngs=nnx.Rngs(0))(jnp.ones((1, 2, D)))
