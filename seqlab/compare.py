"""Finished runs side by side: `python -m seqlab.compare runs/mqar [--figures DIR]`."""

import argparse
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from seqlab.reporting.results import Results, find_results
from seqlab.reporting.statistics import describe


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, writes the figures, and returns the exit code: 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m seqlab.compare", description="Shows finished runs side by side.")
    parser.add_argument("roots", nargs="+", type=Path, metavar="DIRECTORY", help="runs are looked for below it")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write a PNG for each measure into DIR")
    options = parser.parse_args(arguments)
    try:
        runs = collect(options.roots)
        print_table(runs)
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


def print_table(runs: dict[str, Results]) -> None:
    # A pipe has no width, for which rich would assume 80 columns; brackets are intervals, not markup.
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    table = Table()
    table.add_column("run", overflow="fold")
    for title in ("status", "members", "main metric", "parameters", "state bytes", "tokens/s"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("controls broken", overflow="fold")
    for name, results in runs.items():
        cost = (results["cost"].get(key) for key in ("parameters", "state_bytes", "tokens_per_second"))
        broken = [control for control, outcome in results["controls"].items() if not outcome["holds"]]
        table.add_row(
            name,
            results["status"],
            str(len(results["members"])),
            main_metric(results),
            *("-" if number is None else f"{number:,.0f}" for number in cost),
            Text(", ".join(broken), style="bold white on red"),
        )
    console.print(table)


def main_metric(results: Results) -> str:
    """The first metric of the members, which is the task's main one, with its spread."""
    metrics = [member["metrics"] for member in results["members"]]
    if not metrics or not metrics[0]:
        return "-"
    name = next(iter(metrics[0]))
    return f"{name.replace('_', ' ')} {describe([metric.get(name) for metric in metrics])}"


def write_figures(runs: dict[str, Results], directory: Path) -> None:
    """Writes all runs into one PNG for each measure over one axis (curves) or none (bars), named by the measure."""
    # matplotlib is loaded here only, so that the table comes at once.
    from seqlab.reporting.figures import measure_figures

    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in measure_figures(runs).items():
        file_name = re.sub(r"[^\w.-]+", "_", name)
        figure.savefig(directory / f"{file_name}.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
