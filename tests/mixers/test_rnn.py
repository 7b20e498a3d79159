"""Recurrent networks against their formulas and PyTorch with copied weights, and their starting values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.mixers.base import Recurrence
from seqlab.mixers.rnn import GRU, LSTM, Elman

B, T, D, N = 3, 9, 5, 4
# nine steps of sums of ten products of numbers of a few units: some 200 roundings of 2^-24, of the largest number
ATOL = 5e-5

TORCH_GATES = {  # the order in which PyTorch stacks the gates
    Elman: ("RNN", ["hidden"]),
    GRU: ("GRU", ["reset", "update", "new"]),
    LSTM: ("LSTM", ["input", "forget", "cell", "output"]),
}


def randomised(kind):
    mixer = kind(D, state_size=N, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)
    for param in jax.tree.leaves(nnx.state(mixer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        param[...] = 0.5 * jax.random.normal(keys(), param.shape)
    return mixer


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


FORMULAS = {  # the next state [.., N] from the gates' drives, the recurrent products and the state
    Elman: lambda u, r, bias, h, c: (np.tanh(u["hidden"] + r["hidden"]), c),
    GRU: lambda u, r, bias, h, c: (
        (1 - (z := sigmoid(u["update"] + r["update"])))
        * np.tanh(u["new"] + sigmoid(u["reset"] + r["reset"]) * (r["new"] + bias))
        + z * h,
        c,
    ),
    LSTM: lambda u, r, bias, h, c: (
        sigmoid(u["output"] + r["output"])
        * np.tanh(
            new := sigmoid(u["forget"] + r["forget"]) * c
            + sigmoid(u["input"] + r["input"]) * np.tanh(u["cell"] + r["cell"])
        ),
        new,
    ),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_outputs_are_those_of_the_formula(kind):
    mixer = randomised(kind)
    x = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
    bias = np.float64(mixer.recurrent_bias[...]) if kind is GRU else 0.0
    h = c = np.zeros((B, N))
    for t in range(T):
        drive = {
            g: np.float64(x[:, t]) @ np.float64(m.kernel[...]) + np.float64(m.bias[...])
            for g, m in mixer.inputs.items()
        }
        product = {g: h @ np.float64(m[...]) for g, m in mixer.recurrent.items()}
        h, c = FORMULAS[kind](drive, product, bias, h, c)
    last = h @ np.float64(mixer.out.kernel[...]) + np.float64(mixer.out.bias[...])
    np.testing.assert_allclose(mixer(jnp.asarray(x))[:, -1], last, atol=ATOL)


@pytest.mark.parametrize("kind", TORCH_GATES)
def test_outputs_and_gradients_are_those_of_pytorch(kind):
    torch = pytest.importorskip("torch", reason="the reference is PyTorch: pip install 'seqlab[parity]'")
    name, gates = TORCH_GATES[kind]
    mixer = randomised(kind)
    rng = np.random.default_rng(0)
    x, readout = (rng.normal(size=(B, T, D)).astype(np.float32) for _ in range(2))

    def to_torch(array):
        return torch.tensor(np.asarray(array))

    network, out = getattr(torch.nn, name)(D, N, batch_first=True), torch.nn.Linear(N, D)
    with torch.no_grad():
        network.weight_ih_l0.copy_(torch.cat([to_torch(mixer.inputs[g].kernel[...].T) for g in gates]))
        network.bias_ih_l0.copy_(torch.cat([to_torch(mixer.inputs[g].bias[...]) for g in gates]))
        network.weight_hh_l0.copy_(torch.cat([to_torch(mixer.recurrent[g][...].T) for g in gates]))
        network.bias_hh_l0.zero_()
        if kind is GRU:
            network.bias_hh_l0[-N:] = to_torch(mixer.recurrent_bias[...])
        out.weight.copy_(to_torch(mixer.out.kernel[...].T))
        out.bias.copy_(to_torch(mixer.out.bias[...]))
    torch_x = torch.tensor(x, requires_grad=True)
    torch_y = out(network(torch_x)[0])
    (torch_y * torch.tensor(readout)).sum().backward()

    graph, params = nnx.split(mixer)

    @jax.jit
    def with_gradients(params, x):
        y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return y, *pull(jnp.asarray(readout))

    y, by_param, by_x = with_gradients(params, x)

    def stacked(parts):
        return np.concatenate([np.asarray(part[...]).T for part in parts])

    pairs = [
        (y, torch_y.detach()),
        (by_x, torch_x.grad),
        (stacked(by_param["inputs"][g]["kernel"] for g in gates), network.weight_ih_l0.grad),
        (stacked(by_param["inputs"][g]["bias"] for g in gates), network.bias_ih_l0.grad),
        (stacked(by_param["recurrent"][g] for g in gates), network.weight_hh_l0.grad),
        (by_param["out"]["kernel"][...].T, out.weight.grad),
    ]
    if kind is GRU:
        pairs.append((by_param["recurrent_bias"][...], network.bias_hh_l0.grad[-N:]))
    for actual, reference in pairs:
        np.testing.assert_allclose(actual, reference, atol=ATOL * max(1, float(abs(reference).max())), rtol=0)


@pytest.mark.parametrize("kind", TORCH_GATES)
def test_recurrent_matrices_start_orthogonal_each_of_its_own(kind):
    mixer = kind(D, state_size=16, rngs=nnx.Rngs(0))
    matrices = [np.asarray(matrix[...], np.float64) for matrix in mixer.recurrent.values()]
    for matrix in matrices:
        # the QR decomposition of a 16 x 16 matrix is orthogonal up to some 16 roundings of 2^-24
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(16), atol=2e-6)
    assert len({matrix.tobytes() for matrix in matrices}) == len(matrices)


def test_an_lstm_starts_by_remembering():
    mixer = LSTM(D, rngs=nnx.Rngs(0))
    assert {gate: set(linear.bias[...].tolist()) for gate, linear in mixer.inputs.items()} == {
        "input": {0.0},
        "forget": {1.0},
        "cell": {0.0},
        "output": {0.0},
    }


@pytest.mark.parametrize("kind", TORCH_GATES)
def test_what_acts_on_the_state_is_a_recurrence(kind):
    mixer = kind(D, rngs=nnx.Rngs(0))
    assert all(isinstance(matrix, Recurrence) for matrix in mixer.recurrent.values())
    assert mixer.state_size == D  # as wide as the stream where nothing is said
    others = (*mixer.inputs.values(), mixer.out)
    assert not any(isinstance(param, Recurrence) for linear in others for param in (linear.kernel, linear.bias))
    if kind is GRU:
        assert isinstance(mixer.recurrent_bias, Recurrence)
