"""Networks that go step by step, beside PyTorch's and the ways not taken: `python -m benchmarks.recurrent [NAME]`.

Needs the extra `parity` for PyTorch, and an idle machine: its threads wait for each other by spinning, and where others
want the cores they wait for long. Every number is a ratio within one run: see `benchmarks/timing.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.linear import Linear
from seqlab.mixers.base import Mixer
from seqlab.mixers.minimal import MinGRU, MinLSTM
from seqlab.mixers.rnn import GRU, LSTM, Elman, GatedCell
from seqlab.mixers.xlstm import MLSTM, SLSTM
from seqlab.recurrence import unroll

B, T, D = 64, 256, 128
SHAPE = f"B={B} T={T} D={D}"
KINDS = {"RNN": (Elman, 3.0), "GRU": (GRU, 1.5), "LSTM": (LSTM, 1.0)}
"""PyTorch's name, the mixer, and how many times faster it should be."""


def draw(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (T, B, D))


def gradient(run: Callable[[Any, jax.Array], jax.Array], mixer: Mixer) -> Callable[[], Any]:
    """Forward and backward pass over a time-major sequence, to all weights and to the inputs."""
    graph, params = nnx.split(mixer)
    x, readout = draw(0), draw(1)

    def value(params: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(run(nnx.merge(graph, params), x) * readout)

    return partial(jax.jit(jax.grad(value, argnums=(0, 1))), params, x)


def hidden(states: Any) -> jax.Array:
    return states["hidden"] if isinstance(states, dict) else states


def layer(mixer: GatedCell, x: jax.Array) -> jax.Array:
    """All states, as PyTorch's layers give them: without the read-out that a mixer adds."""
    return recomputed(jax.checkpoint_policies.dots_saveable, mixer, x)  # as `Cell.run` does


def torch_layer(name: str) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(2)
    network = getattr(torch.nn, name)(D, D)
    x, readout = torch.randn(T, B, D, requires_grad=True), torch.randn(T, B, D)

    def call() -> Any:
        return torch.autograd.grad((network(x)[0] * readout).sum(), (x, *network.parameters()))

    return call


def beside_torch(rounds: int) -> list[Table]:
    def compare(name: str, kind: type[GatedCell], times: float) -> Table:
        candidates = {f"torch.nn.{name}": torch_layer(name), "seqlab": gradient(layer, kind(D, rngs=nnx.Rngs(0)))}
        question = f"{kind.__name__} layer, forward and backward, {SHAPE}"
        return ratios(question, take_turns(candidates, rounds), Goal("seqlab", 1 / times))

    return [compare(name, *row) for name, row in KINDS.items()]


def in_halves(mixer: GatedCell, x: jax.Array) -> jax.Array:
    """Two scans that do not depend on each other, for XLA to run side by side."""
    return jnp.concatenate([layer(mixer, half) for half in jnp.split(x, 2, axis=1)], axis=1)


def recomputed(policy: Callable[..., bool], mixer: GatedCell, x: jax.Array) -> jax.Array:
    """The backward pass computes again what the policy does not save."""
    advance = jax.checkpoint(mixer.advance, policy=policy, prevent_cse=False)
    return hidden(unroll(advance, mixer.init_state(x.shape[1], len(x)), mixer.drive(x))[1])


def one_matrix(mixer: GRU, x: jax.Array) -> jax.Array:
    """One recurrent product for all gates, cut into gates in each step."""
    gates = list(mixer.recurrent)
    matrix = jnp.concatenate([mixer.recurrent[gate][...] for gate in gates], axis=1)

    def advance(h: jax.Array, drive: dict[str, jax.Array]) -> jax.Array:
        products = dict(zip(gates, jnp.split(h @ matrix, len(gates), axis=1), strict=True))
        reset, update = (jax.nn.sigmoid(drive[gate] + products[gate]) for gate in ("reset", "update"))
        new = jnp.tanh(drive["new"] + reset * (products["new"] + mixer.recurrent_bias[...]))
        return (1.0 - update) * new + update * h

    return unroll(advance, mixer.init_state(x.shape[1], len(x)), mixer.drive(x))[1]


def ways(rounds: int) -> list[Table]:
    policies = jax.checkpoint_policies
    runs: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
        "seqlab": layer,
        "one recurrent matrix for all gates": one_matrix,
        "two scans, each over half of the batch": in_halves,
        "gates saved too": partial(recomputed, policies.everything_saveable),
        "gates and products recomputed": partial(recomputed, policies.nothing_saveable),
    }
    candidates = {name: gradient(run, GRU(D, rngs=nnx.Rngs(0))) for name, run in runs.items()}
    return [ratios(f"Ways to a GRU, forward and backward, {SHAPE}", take_turns(candidates, rounds))]


def architectures(rounds: int) -> list[Table]:
    mixers: dict[str, Callable[..., Mixer]] = {
        "GRU": GRU,
        "Elman": Elman,
        "LSTM": LSTM,
        "sLSTM, 4 heads": SLSTM,
        "mLSTM, 4 heads": MLSTM,
        "minGRU": MinGRU,
        "minLSTM": MinLSTM,
    }

    def run(mixer: Any, x: jax.Array) -> jax.Array:
        return mixer.run(mixer.init_state(B, T), x, None)[1]

    candidates = {name: gradient(run, mixer(D, rngs=nnx.Rngs(0))) for name, mixer in mixers.items()}
    return [ratios(f"Mixers, forward and backward, {SHAPE}", take_turns(candidates, rounds))]


def rows(rounds: int) -> list[Table]:
    """A projection of [B, T, D] with its leading axes, and over rows, as `seqlab.linear` has it."""

    def compare(batch: int, length: int, width: int, outer: int) -> Table:
        x = jax.random.normal(jax.random.key(0), (batch, length, width))

        def timed(kind: type[nnx.Linear]) -> Callable[[], Any]:
            graph, params = nnx.split(kind(width, outer, rngs=nnx.Rngs(0)))

            def value(params: nnx.State, x: jax.Array) -> jax.Array:
                return jnp.sum(nnx.merge(graph, params)(x) ** 2)

            return partial(jax.jit(jax.grad(value, argnums=(0, 1))), params, x)

        candidates = {"nnx.Linear": timed(nnx.Linear), "over rows": timed(Linear)}
        question = f"Linear, forward and backward, [{batch}, {length}, {width}] to {outer}"
        return ratios(question, take_turns(candidates, rounds))

    return [compare(64, 256, 128, 512), compare(64, 64, 64, 64)]


BENCHMARKS = {"beside_torch": beside_torch, "ways": ways, "architectures": architectures, "rows": rows}

if __name__ == "__main__":
    main("Recurrent networks", BENCHMARKS)
