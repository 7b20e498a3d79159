"""What attention over blocks costs beside JAX's own: `python -m benchmarks.attention [--write FILE] [NAME]`.

Every number is a ratio within one run: see `benchmarks/timing.py`. Run it from the root of a checkout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.attend import attend
from seqlab.types import Places

HEADS = 4
SHAPES = ((8, 1024, 32), (8, 1024, 64), (2, 4096, 32), (2, 4096, 64))
"""Batch, length, head width."""
WINDOW = 256
GOAL = Goal("seqlab", 1 / 2.3)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    places = Places(jnp.arange(q.shape[1])[None])
    return attend(q, k, v, places, places, causal=True, scale=q.shape[-1] ** -0.5, window=window)


CANDIDATES = {
    "jax.nn.dot_product_attention": partial(jax.nn.dot_product_attention, is_causal=True),
    "seqlab": attention,
}
IN_WINDOW = {
    "jax.nn.dot_product_attention": partial(
        jax.nn.dot_product_attention, is_causal=True, local_window_size=(WINDOW - 1, 0)
    ),
    "seqlab": partial(attention, window=WINDOW),
}


def gradient(function: Callable[..., jax.Array], batch: int, length: int, width: int) -> tuple[Any, list[jax.Array]]:
    """Forward and backward pass, compiled, and what to call it with."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (function(q, k, v) ** 2).sum()

    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (batch, length, HEADS, width)) for key in keys]
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile(), arrays


def causal(rounds: int) -> list[Table]:
    return [_compare("Causal attention", CANDIDATES, shape, rounds, GOAL) for shape in SHAPES]


def window(rounds: int) -> list[Table]:
    return [_compare(f"Sliding window of {WINDOW}", IN_WINDOW, (2, 4096, 32), rounds)]


def _compare(
    what: str,
    functions: dict[str, Callable[..., jax.Array]],
    shape: tuple[int, int, int],
    rounds: int,
    goal: Goal | None = None,
) -> Table:
    programs = {name: gradient(function, *shape) for name, function in functions.items()}
    candidates = {name: partial(program, *arrays) for name, (program, arrays) in programs.items()}
    batch, length, width = shape
    question = f"{what}, forward and backward, B={batch} T={length} H={HEADS} K={width}"
    return ratios(question, take_turns(candidates, rounds), goal)


def memory(rounds: int) -> list[Table]:
    """Temporary memory of forward and backward pass, which XLA fixes when it compiles."""
    lengths = (1024, 2048, 4096, 8192)
    table = Table("MiB", *(f"T={length}" for length in lengths), title=f"Temporary memory, B=2 H={HEADS} K=32")
    for name, function in CANDIDATES.items():
        programs = [gradient(function, 2, length, 32)[0] for length in lengths]
        table.add_row(name, *(f"{program.memory_analysis().temp_size_in_bytes / 2**20:,.0f}" for program in programs))
    return [table]


BENCHMARKS = {"causal": causal, "window": window, "memory": memory}

if __name__ == "__main__":
    main("What attention costs", BENCHMARKS)
