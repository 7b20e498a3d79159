"""Ratios of times: candidates take turns within each round, so that what else the machine does falls on all alike."""

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Goal:
    """The ratio that a candidate must stay below."""

    candidate: str
    ratio: float


def ratios(question: str, seconds: Mapping[str, Float[np.ndarray, " rounds"]], goal: Goal | None = None) -> Table:
    """Candidates, their milliseconds, their ratios to the first one's time in the same round: median [lowest, highest].

    The caption says whether the goal is met.
    """
    first = next(iter(seconds.values()))
    table = Table("candidate", "milliseconds", "ratio", title=question)
    for i, (name, times) in enumerate(seconds.items()):
        table.add_row(name, _spread(1e3 * times), _spread(times / first) if i else "1")
    if goal is not None:
        met = np.median(seconds[goal.candidate] / first) < goal.ratio
        table.caption = f"{goal.candidate} < {goal.ratio:.3g}: {'met' if met else 'MISSED'}"
    return table


def take_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, units: int = 1
) -> dict[str, Float[np.ndarray, " rounds"]]:
    """Seconds a unit of each candidate, a call of which does `units` units; the first call compiles, untimed."""
    for call in candidates.values():
        jax.block_until_ready(call())
    seconds = {name: np.zeros(rounds) for name in candidates}
    for i in range(rounds):
        for name, call in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name][i] = (time.perf_counter() - start) / units
    return seconds


def machine() -> str:
    """What the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    return (
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores of {cpu}, load {load:.1f}; "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )


def as_markdown(table: Table) -> str:
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    header, *rows = (f"| {' | '.join(row)} |" for row in zip(*columns, strict=True))
    caption = [f"\nGoal: {table.caption}."] if table.caption else []
    return "\n".join([f"**{table.title}**\n", header, "|---" * len(columns) + "|", *rows, *caption, ""])


def main(title: str, benchmarks: Mapping[str, Callable[[int], list[Table]]]) -> None:
    """The command line of a file of benchmarks, each of which gives tables from so many rounds."""
    parser = argparse.ArgumentParser(description="Prints ratios of times.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(benchmarks)}; none: all")
    parser.add_argument("--rounds", type=int, default=9, help="how often each candidate is timed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results as Markdown too")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in benchmarks]
    if unknown:
        parser.error(f"{unknown[0]} is unknown; use {', '.join(benchmarks)}")
    console = Console(markup=False, highlight=False)  # brackets are intervals, not markup
    report = [f"# {title}\n\n{machine()}. Each number is a median [lowest, highest]; lower is better.\n"]
    console.print(machine())
    for name in options.names or benchmarks:
        for table in benchmarks[name](options.rounds):
            console.print(table)
            report.append(as_markdown(table))
    if options.write:
        options.write.write_text("\n".join(report))


def _spread(values: Float[np.ndarray, " rounds"]) -> str:
    median, low, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (np.median(values), values.min(), values.max())
    )
    return f"{median} [{low}, {high}]"
