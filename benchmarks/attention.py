"""What attention over blocks costs beside JAX's own: `python -m benchmarks.attention [--write FILE] [NAME]`.

Every number is a ratio within one run: see `benchmarks/timing.py`. Run it from the root of a checkout.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Comparison, Goal, as_markdown, as_table, machine, take_turns
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


def causal(rounds: int) -> list[Comparison]:
    return [_compare("Causal attention", CANDIDATES, shape, rounds, GOAL) for shape in SHAPES]


def window(rounds: int) -> list[Comparison]:
    return [_compare(f"Sliding window of {WINDOW}", IN_WINDOW, (2, 4096, 32), rounds)]


def _compare(
    what: str,
    functions: dict[str, Callable[..., jax.Array]],
    shape: tuple[int, int, int],
    rounds: int,
    goal: Goal | None = None,
) -> Comparison:
    programs = {name: gradient(function, *shape) for name, function in functions.items()}
    candidates = {name: partial(program, *arrays) for name, (program, arrays) in programs.items()}
    batch, length, width = shape
    question = f"{what}, forward and backward, B={batch} T={length} H={HEADS} K={width}"
    return Comparison(question, take_turns(candidates, rounds), goal)


def memory() -> Table:
    """Temporary memory of forward and backward pass, which XLA fixes when it compiles."""
    lengths = (1024, 2048, 4096, 8192)
    table = Table("MiB", *(f"T={length}" for length in lengths), title=f"Temporary memory, B=2 H={HEADS} K=32")
    for name, function in CANDIDATES.items():
        programs = [gradient(function, 2, length, 32)[0] for length in lengths]
        table.add_row(name, *(f"{program.memory_analysis().temp_size_in_bytes / 2**20:,.0f}" for program in programs))
    return table


def _memory_as_markdown(table: Table) -> str:
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    header, *rows = (f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))
    return "\n".join([f"**{table.title}**\n", header, "|---" * len(columns) + "|", *rows, ""])


BENCHMARKS = {"causal": causal, "window": window}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description="Prints ratios of times.")
    names = (*BENCHMARKS, "memory")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; none: all")
    parser.add_argument("--rounds", type=int, default=9, help="how often each candidate is timed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results as Markdown too")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"{unknown[0]} is unknown; use {', '.join(names)}")
    console = Console(markup=False, highlight=False)  # brackets are intervals, not markup
    report = [f"# What attention costs\n\n{machine()}. Each number is a median [lowest, highest]; lower is better.\n"]
    console.print(machine())
    for name in options.names or names:
        if name == "memory":
            table = memory()
            console.print(table)
            report.append(_memory_as_markdown(table))
            continue
        for comparison in BENCHMARKS[name](options.rounds):
            console.print(as_table(comparison))
            report.append(as_markdown(comparison))
    if options.write:
        options.write.write_text("\n".join(report))


if __name__ == "__main__":
    main()
