"""Finished runs side by side: `python -m seqlab.compare runs/mqar [--figures DIR]`."""

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqlab.reporting.results import Results, find_results, labels
from seqlab.reporting.statistics import interquartile_mean, probability_of_improvement, ranked
from seqlab.reporting.tuning import judged, main_scores, outcome

MOST = 12
"""Competitors that a table of all pairs has room for."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables, writes the figures, and returns the exit code: 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m seqlab.compare", description="Shows finished runs side by side.")
    parser.add_argument("roots", nargs="+", type=Path, metavar="DIRECTORY", help="runs are looked for below it")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write a PNG for each measure into DIR")
    options = parser.parse_args(arguments)
    try:
        runs = collect(options.roots)
        print_table(runs)
        print_improvements(runs)
        if options.figures:
            write_figures(runs, options.figures)
    except (ValueError, OSError) as error:
        print(f"seqlab.compare: {error}", file=sys.stderr)
        return 2
    return 0


def collect(roots: list[Path]) -> dict[str, Results]:
    """All runs below the roots by name: the path below the root, which stands before it where there are several roots.

    Raises:
        ValueError: a root is no directory, or there is no run below any of them.
    """
    runs = {}
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"{root} is not a directory; name one that holds runs, such as runs/mqar")
        for name, results in find_results(root):
            runs[f"{root.as_posix()}/{name}" if len(roots) > 1 else name] = results
    if not runs:
        raise ValueError(
            f"no results.json below {', '.join(map(str, roots))}; train something with python -m seqlab.run"
        )
    return runs


def console() -> Console:
    # A pipe has no width, for which rich would assume 80 columns; brackets are intervals, not markup.
    return Console(width=None if sys.stdout.isatty() else 240, markup=False, highlight=False)


def print_table(runs: dict[str, Results]) -> None:
    """One row a run: what its members at the chosen learning rate came to, with 95 % intervals, and what it costs."""
    table = Table()
    table.add_column("run", overflow="fold")
    for title in ("status", "members", "main metric", "diverged", "solved [95 %]", "steps to solve", "learning rate"):
        table.add_column(title, justify="right", overflow="fold")
    for title in ("parameters", "state bytes", "FLOPs/token", "tokens/s"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("controls broken", overflow="fold")
    for name, results in runs.items():
        keys = ("parameters", "state_bytes", "flops_per_token", "tokens_per_second")
        cost = (results["cost"].get(key) for key in keys)
        broken = [control for control, outcome in results["controls"].items() if not outcome["holds"]]
        cells = outcome(results)
        metric = results["tuning"]["metric"].replace("_", " ")
        fitted = results["match"]
        table.add_row(
            name + (f"\n(fitted: model.{fitted['by']}={fitted['value']})" if fitted else ""),
            results["status"],
            f"{len(judged(results))} of {len(results['members'])}",
            cells["main metric"] if cells["main metric"] == "-" else f"{metric} {cells['main metric']}",
            cells["diverged"],
            cells["solved"],
            cells["steps to solve"],
            Text(cells["learning rate"], style="bold yellow" if results["tuning"]["at_edge"] else ""),
            *("-" if number is None else f"{number:,.0f}" for number in cost),
            Text(", ".join(broken), style="bold white on red"),
        )
    out = console()
    out.print("interquartile mean [95 % interval] of the members with the chosen learning rate")
    out.print(table)


def print_improvements(runs: dict[str, Results]) -> None:
    """How likely a member of the row is better than one of the column, over the tasks that both ran.

    Nothing where there are no two competitors, or too many.
    """
    rivals = competitors(runs)
    if not 2 <= len(rivals) <= MOST:
        return
    tasks = {task for ran in rivals.values() for task in ran}
    names = labels(list(rivals))
    title = "row beats column: probability of improvement [95 % interval]; members that diverged lose"
    title += f"; mean over the tasks that both ran, of {len(tasks)}" * (len(tasks) > 1)
    table = Table()
    for head in ("", *names, *["interquartile mean over tasks"] * (len(tasks) > 1)):
        table.add_column(head, overflow="fold")
    for name, own in zip(names, rivals.values(), strict=True):
        cells = ["" if own is other else improvement(own, other) for other in rivals.values()]
        table.add_row(name, *cells, *[over_tasks(own, tasks)] * (len(tasks) > 1))
    out = console()
    out.print(title)
    out.print(table)


def competitors(runs: dict[str, Results]) -> dict[str, dict[str, Results]]:
    """Who competes on what: name -> task -> the run that was measured there.

    Where there are several tasks, the runs of a model with the same words, those of the task aside, are one competitor.
    """
    measured = {name: results for name, results in runs.items() if main_scores(results) is not None}
    tasks = {name: task(results) for name, results in measured.items()}
    found: dict[str, dict[str, Results]] = {}
    for name, results in measured.items():
        *_, model, words = ("", *name.split("/"))
        kept = [word for word in re.split(r",(?=[\w.]+=)", words) if not word.startswith("task.")]
        who = name if len(set(tasks.values())) == 1 else f"{model}/{','.join(kept) or 'defaults'}"
        if tasks[name] in found.get(who, {}):
            who = name
        found.setdefault(who, {})[tasks[name]] = results
    return found


def task(results: Results) -> str:
    """The same for runs that were asked the same."""
    asked = results["config"].get("task")
    # What `auto` came to depends on whether the model looks ahead, of which its control knows.
    auto = isinstance(asked, dict) and asked.get("objective") == "auto"
    future = results["controls"].get("future", {}).get("expected") if auto else None
    return json.dumps([asked, results["tuning"]["metric"], future], sort_keys=True)


def improvement(own: dict[str, Results], other: dict[str, Results]) -> str:
    shared = [task for task in own if task in other]
    if not shared:
        return "-"
    xs, ys = (
        [ranked(main_scores(runs[task]), runs[task]["tuning"]["higher_is_better"]) for task in shared]
        for runs in (own, other)
    )
    return str(probability_of_improvement(xs, ys))


def over_tasks(own: dict[str, Results], tasks: set[str]) -> str:
    """The mean of one metric over all tasks, where it is measured in each."""
    scores = [values for values in map(main_scores, own.values()) if values is not None]
    metrics = {results["tuning"]["metric"] for results in own.values()}
    complete = set(own) == tasks and len(metrics) == 1 and all(np.isfinite(values).any() for values in scores)
    return str(interquartile_mean(*scores)) if complete else "-"


def write_figures(runs: dict[str, Results], directory: Path) -> None:
    """Writes all runs into one PNG for each measure over one axis (curves) or none (bars), named by the measure.

    And one of validation scores by learning rate, where there were several rates.
    """
    # matplotlib is loaded here only, so that the table comes at once.
    from seqlab.reporting.figures import measure_figures, tuning_figures

    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in (measure_figures(runs) | tuning_figures(runs)).items():
        file_name = re.sub(r"[^\w.-]+", "_", name)
        figure.savefig(directory / f"{file_name}.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
