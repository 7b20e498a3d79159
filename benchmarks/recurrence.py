"""The diagonal recurrence within a mixer, by form and against others: `python -m benchmarks.recurrence [--write FILE]`.

Needs the extra `parity` for PyTorch. Every number is a ratio within one run: see `benchmarks/timing.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.mixers.minimal import MinGRU
from seqlab.mixers.ssm import LRU
from seqlab.recurrence import linear_recurrence

N = 128


def draw(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def forward_backward(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A square, since the gradient of a sum would not need the states."""

    def scalar(*arguments: Any) -> Any:
        return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(function(*arguments)))

    return partial(jax.jit(jax.grad(scalar, argnums=tuple(range(len(arguments))))), *arguments)


def alone(rounds: int) -> list[Table]:
    """h_t = a_t h_{t-1} + b_t with a decay of its own at each step."""

    def compare(batch: int, length: int) -> Table:
        a, b = jax.nn.sigmoid(draw(length, batch, N)), draw(length, batch, N)

        def ours(scan: str, a: jax.Array, b: jax.Array) -> jax.Array:
            return linear_recurrence(lambda ab: ab, jnp.zeros((batch, N)), (a, b), scan=scan)[1]

        def compose(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        def theirs(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
            return jax.lax.associative_scan(compose, (a, b), axis=axis)[1]

        rows = (a.swapaxes(0, 1), b.swapaxes(0, 1))
        candidates = {
            "jax.lax.associative_scan, [B, T, N]": forward_backward(partial(theirs, 1), *rows),
            "jax.lax.associative_scan, [T, B, N]": forward_backward(partial(theirs, 0), a, b),
            **{scan: forward_backward(partial(ours, scan), a, b) for scan in ("sequential", "associative", "chunked")},
        }
        if length == 1024:
            candidates["torch associative_scan"] = torch_scan(batch, length)
        question = f"Diagonal recurrence, forward and backward, B={batch} T={length} N={N}"
        return ratios(question, take_turns(candidates, rounds), Goal("sequential", 1 / 3.3))

    return [compare(16, 1024), compare(1, 16_384)]


def torch_scan(batch: int, length: int) -> Callable[[], object]:
    """PyTorch's own, whose gradient it finds by tracing."""
    import torch
    from torch._higher_order_ops.associative_scan import associative_scan

    torch.set_num_threads(2)
    a = torch.rand(batch, length, N, requires_grad=True)
    b = torch.randn(batch, length, N, requires_grad=True)

    def compose(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def call() -> object:
        h = associative_scan(compose, (a, b), dim=1, combine_mode="generic")[1]
        return torch.autograd.grad((h**2).sum(), (a, b))

    return call


def within_a_mixer(rounds: int) -> list[Table]:
    """The whole mixer, projections included."""

    def compare(name: str, mixer: Callable[..., Any], batch: int, length: int) -> Table:
        def timed(scan: str) -> Callable[[], Any]:
            graph, params = nnx.split(mixer(N, state_size=N, scan=scan, rngs=nnx.Rngs(0)))
            return forward_backward(lambda params, x: nnx.merge(graph, params)(x), params, draw(batch, length, N))

        candidates = {scan: timed(scan) for scan in ("associative", "sequential", "chunked")}
        question = f"{name}, forward and backward, B={batch} T={length} D=N={N}"
        return ratios(question, take_turns(candidates, rounds), Goal("sequential", 1 / 3.3))

    shapes = ((16, 1024), (1, 16_384))
    return [compare(name, mixer, *shape) for name, mixer in (("LRU", LRU), ("minGRU", MinGRU)) for shape in shapes]


BENCHMARKS = {"alone": alone, "within_a_mixer": within_a_mixer}

if __name__ == "__main__":
    main("Linear recurrences", BENCHMARKS)
