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


@dataclass(frozen=True)
class Comparison:
    """Seconds of each candidate in each round; the ratios are to the first candidate's time of the same round."""

    question: str
    seconds: Mapping[str, Float[np.ndarray, " rounds"]]
    goal: Goal | None = None

    def ratio(self, candidate: str) -> Float[np.ndarray, " rounds"]:
        return self.seconds[candidate] / next(iter(self.seconds.values()))

    @property
    def verdict(self) -> str:
        """`met`, `MISSED`, or nothing where there is no goal."""
        if self.goal is None:
            return ""
        met = np.median(self.ratio(self.goal.candidate)) < self.goal.ratio
        return f"{self.goal.candidate} < {self.goal.ratio:.3g}: {'met' if met else 'MISSED'}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Candidate, its milliseconds, its ratio to the first: each as median [lowest, highest]."""
        return [
            (name, _spread(1e3 * seconds), "1" if i == 0 else _spread(self.ratio(name)))
            for i, (name, seconds) in enumerate(self.seconds.items())
        ]


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


def as_table(comparison: Comparison) -> Table:
    table = Table("candidate", "milliseconds", "ratio", title=comparison.question, caption=comparison.verdict)
    for row in comparison.rows():
        table.add_row(*row)
    return table


def as_markdown(comparison: Comparison) -> str:
    rows = "\n".join(f"| {' | '.join(row)} |" for row in comparison.rows())
    heading = f"**{comparison.question}**\n\n| candidate | milliseconds | ratio |\n|---|---|---|\n{rows}\n"
    return heading + (f"\nGoal: {comparison.verdict}.\n" if comparison.verdict else "")


def main(title: str, benchmarks: Mapping[str, Callable[[int], list[Comparison]]]) -> None:
    """The command line of a file of benchmarks, each of which compares in so many rounds."""
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
        for comparison in benchmarks[name](options.rounds):
            console.print(as_table(comparison))
            report.append(as_markdown(comparison))
    if options.write:
        options.write.write_text("\n".join(report))


def _spread(values: Float[np.ndarray, " rounds"]) -> str:
    median, low, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (np.median(values), values.min(), values.max())
    )
    return f"{median} [{low}, {high}]"
