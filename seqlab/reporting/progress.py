"""What a run says on the terminal while it trains and when it is done. All of it goes to standard error."""

import sys
import time
from collections.abc import Mapping
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from seqlab.reporting.results import Results
from seqlab.reporting.statistics import Members, describe, spread
from seqlab.reporting.tuning import EDGE, grid, judged, of_judged, outcome

LOG_SECONDS = 60


@final
class TrainingProgress:
    """A progress bar: step, loss, main metric, tokens a second and the time left; in a log a line a minute.

    What is printed while it is open appears above the bar.
    """

    def __init__(self, steps: int, metric: str, tokens_per_step: int, first_step: int = 0):
        """Counts to `steps` from `first_step`, which is where a resumed run goes on."""
        self._metric, self._tokens_per_step = metric, tokens_per_step
        self._steps, self._step, self._since = steps, first_step, time.perf_counter()
        self._watched, self._said = sys.stderr.isatty(), self._since
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        # `isatty` and not rich's own judgement, which FORCE_COLOR overrules; the long period since one chunk of steps
        # may take minutes.
        self._progress = Progress(
            *columns,
            console=Console(stderr=True),
            disable=not self._watched,
            expand=True,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task("compiling ...", total=steps, completed=first_step)

    def __enter__(self) -> "TrainingProgress":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def update(self, step: int, values: Mapping[str, Members]) -> None:
        """Moves the bar to `step`, given the values [P] of that step's tags; means over the members are shown."""
        if step == self._step:  # a validation, which comes after the chunk of the same step
            return
        now = time.perf_counter()
        speed = (step - self._step) * self._tokens_per_step / (now - self._since)
        self._step, self._since = step, now
        loss, metric = (spread(values[f"train/{name}"]).mean for name in ("loss", self._metric))
        description = f"loss {loss:.3f}  {self._metric} {metric:.3f}  {_short(speed)} tokens/s"
        self._progress.update(self._task, completed=step, description=description)
        if not self._watched and now - self._said >= LOG_SECONDS:
            self._said = now
            print(f"step {step:,} of {self._steps:,}  {description}", file=sys.stderr, flush=True)


def print_summary(results: Results) -> None:
    """Prints every measure that is a plain number, what known strategies get, the grid of learning rates, and each
    control that does not hold."""
    console = Console(stderr=True, markup=False, highlight=False)  # brackets are intervals, not markup
    members = results["members"]
    table = Table("", "interquartile mean [95 % interval]")
    diverged = sum(member["status"] == "diverged" for member in members)
    count = f"{len(members)} member{'s' * (len(members) != 1)}" + f", {diverged} diverged" * bool(diverged)
    table.add_row("status", f"{results['status']}, {count}")
    rates = grid(results)
    for rate, cell, chosen in rates:
        style = "bold" if chosen else "dim"
        row = f"valid/{results['tuning']['metric']} at {rate:g}"
        table.add_row(Text(row, style=style), Text(cell + ", chosen" * chosen, style=style))
    if rates and results["tuning"]["learning_rate"] is not None:
        diverged = outcome(results)["diverged"]
        table.add_row("judged by", f"{len(judged(results))} of {len(members)} members, {diverged} diverged")
    for name, measure in results["measures"].items():
        if not measure["axes"]:
            table.add_row(name, describe(of_judged(results, measure["values"])))
    if results["measures"]:
        for name in ("solved", "steps to solve"):
            if outcome(results)[name] != "-":
                table.add_row(name, outcome(results)[name])
        ceilings = (f"{name} {value:.3g}" for name, value in results["ceilings"].items() if "/" not in name)
        table.add_row("ceilings", ", ".join(ceilings))
    controls = results["controls"]
    if controls:
        table.add_row(
            "controls that hold", f"{sum(control['holds'] for control in controls.values())} of {len(controls)}"
        )
    console.print(table)
    if results["tuning"]["at_edge"]:
        console.print(Text(EDGE, style="bold yellow"))
    for line in broken_controls(results):
        console.print(Text(line, style="bold white on red"))


def broken_controls(results: Results) -> list[str]:
    """A line for each control whose outcome contradicts what theory says must come out."""
    return [
        f"CONTROL BROKEN: {name} must be {control['expected']} and is {control['value']}"
        for name, control in results["controls"].items()
        if not control["holds"]
    ]


def _short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
