"""One token at a time at batch 1, against a loop in PyTorch: `python -m benchmarks.decoding [--write FILE] [NAME]`.

Needs the extra `parity`. Every number is a ratio within one run: see `benchmarks/timing.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from rich.table import Table

from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.mixers.attention import Attention
from seqlab.mixers.base import Mixer
from seqlab.mixers.rnn import GRU
from seqlab.mixers.ssm import LRU

WIDTH, HEADS, TOKENS = 128, 4, 1024


def decode(mixer: Mixer) -> Callable[[], Any]:
    """`TOKENS` steps in one compiled loop."""
    graph, params = nnx.split(mixer)
    x = jax.random.normal(jax.random.key(0), (TOKENS, 1, WIDTH))

    @jax.jit
    def walk(params: nnx.State, x: jax.Array) -> jax.Array:
        mixer = nnx.merge(graph, params)
        return jax.lax.scan(mixer.step, mixer.init_state(1, TOKENS), x)[1]

    return partial(walk, params, x)


def against(name: str, mixer: Callable[..., Mixer], rival: Callable[[], Any], rounds: int, times: float) -> Table:
    candidates = {"PyTorch": rival, "seqlab": decode(mixer(WIDTH, rngs=nnx.Rngs(0)))}
    return ratios(f"A token, {name}, D={WIDTH}", take_turns(candidates, rounds, TOKENS), Goal("seqlab", 1 / times))


def gru(rounds: int) -> list[Table]:
    import torch

    cell, out = torch.nn.GRUCell(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    x = torch.randn(TOKENS, 1, WIDTH)

    @torch.inference_mode()
    def rival() -> list[Any]:
        h, outputs = torch.zeros(1, WIDTH), []
        for x_t in x:
            h = cell(x_t, h)
            outputs.append(out(h))
        return outputs

    return [against("GRU", GRU, rival, rounds, 6)]


def ssm(rounds: int) -> list[Table]:
    """The LRU in complex numbers, as PyTorch's own implementations write it."""
    import torch

    decay = torch.rand(WIDTH) * torch.exp(6j * torch.rand(WIDTH))
    b, c = (torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH for _ in range(2))
    d, gate, out = torch.randn(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    x = torch.randn(TOKENS, 1, WIDTH)

    @torch.inference_mode()
    def rival() -> list[Any]:
        h, outputs = torch.zeros(1, WIDTH, dtype=torch.complex64), []
        for x_t in x:
            h = decay * h + x_t.to(torch.complex64) @ b
            y = (h @ c).real + d * x_t
            outputs.append(out(y * torch.nn.functional.silu(gate(x_t))))
        return outputs

    return [against("LRU", partial(LRU, state_size=WIDTH), rival, rounds, 5)]


def attention(rounds: int) -> list[Table]:
    """Into a cache of fixed length, of which each step sees the filled part."""
    import torch

    query, key, value, out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
    x = torch.randn(TOKENS, 1, WIDTH)

    @torch.inference_mode()
    def rival() -> list[Any]:
        keys, values = (torch.zeros(1, HEADS, TOKENS, WIDTH // HEADS) for _ in range(2))
        outputs = []
        for t, x_t in enumerate(x):
            q, k, v = (linear(x_t).view(1, HEADS, 1, -1) for linear in (query, key, value))
            keys[:, :, t : t + 1], values[:, :, t : t + 1] = k, v
            y = torch.nn.functional.scaled_dot_product_attention(q, keys[:, :, : t + 1], values[:, :, : t + 1])
            outputs.append(out(y.reshape(1, WIDTH)))
        return outputs

    return [against("attention", partial(Attention, heads=HEADS), rival, rounds, 3)]


BENCHMARKS = {"gru": gru, "ssm": ssm, "attention": attention}

if __name__ == "__main__":
    main("Decoding", BENCHMARKS)
