"""`results.json`: everything a finished run has to say, in one strict JSON file that appears whole or not at all."""

import json
import logging
import math
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from seqlab.reporting.statistics import describe
from seqlab.reporting.tuning import EDGE, Results, grid, of_judged, outcome

FILE_NAME = "results.json"
STATUSES = ("finished", "interrupted", "diverged", "failed")
KEYS = {
    "status": "one of finished, interrupted, diverged, failed",
    "command": "what was typed",
    "config": "the composed configuration",
    "versions": "package -> version",
    "device": "what it ran on",
    "members": "list of {seed, learning_rate, status, metrics: {name: number}, validation, solved_at}",
    "tuning": "metric, higher_is_better, learning_rates, validation, learning_rate, score, at_edge, window_decades",
    "match": "null, or quantity, to, by, value, target, reached, deviation",
    "measures": "name -> {axes: {axis: [its values]}, values: nested lists, the member axis first}",
    "ceilings": "strategy -> what it scores on the main metric: chance, an order-blind reader, an oracle",
    "controls": "name -> {expected: zero or nonzero, value, holds}",
    "cost": "parameters, state_bytes, flops_per_token, tokens_per_second, compile_seconds, train_seconds",
}
PACKAGES = ("seqlab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

LONGEST = 44
"""Characters of a label, of which a legend holds two or more beside each other."""

log = logging.getLogger(__name__)


def write_results(directory: Path, results: Results) -> None:
    """Writes `directory`/results.json: a reader, or a kill at any moment, finds the old file or the new one.

    Numpy arrays and scalars become lists and numbers; NaN and infinities, which JSON lacks, become null.

    Raises:
        ValueError: keys are missing or unknown, the status is unknown, or the values of a measure do not have the shape
            [members, length of each axis].
    """
    _validate(results)
    text = json.dumps(_plain(results), indent=1, allow_nan=False)
    # Not a `tempfile`: those are readable by their owner alone, and would make results.json so.
    temporary = directory / f".{FILE_NAME}.{os.getpid()}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / FILE_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def read_results(directory: Path) -> Results:
    """Reads what `write_results` wrote.

    Raises:
        FileNotFoundError: the run has not written its results.
        ValueError: the file is no results.json.
    """
    path = directory / FILE_NAME
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it and run its command again") from None
    if not isinstance(results, dict) or set(results) != set(KEYS):
        raise ValueError(f"{path} is not a results file: it must have exactly the keys {', '.join(KEYS)}")
    for key in ("members", "tuning", "measures", "controls", "cost"):
        if not isinstance(results[key], list if key == "members" else dict):
            raise ValueError(f"{path} is not a results file: its {key} are {results[key]!r:.40}")
    return results


def find_results(root: Path) -> list[tuple[str, Results]]:
    """All runs below `root`, as (path relative to `root`, results); what cannot be read is skipped with a warning."""
    found = []
    for path in sorted(root.rglob(FILE_NAME)):
        name = path.parent.relative_to(root).as_posix()
        try:
            found.append((path.parent.resolve().name if name == "." else name, read_results(path.parent)))
        except (OSError, ValueError) as error:
            log.warning("skipped: %s", error)
    return found


def labels(runs: Sequence[str]) -> list[str]:
    """What tells runs apart, short enough for a legend: of their names `task/model/key=value,key=value` the words that
    they do not all share."""
    words = [re.split(r"/|,(?=[\w.]+=)", run) for run in runs]
    shared = set.intersection(*map(set, words)) if len(runs) > 1 else {w for own in words for w in own if "=" in w}
    apart = [[word for word in own if word not in shared] for own in words]
    short = [" ".join(word for word in own if word != "defaults" or len(own) == 1) for own in apart]
    told_apart = len(set(short)) == len(runs) and (all(short) or len(runs) == 1)
    plain = [re.sub(r"[\w.]+\.(?=\w+=)", "", label) for label in short]  # model.width=8 -> width=8
    candidates = [*[plain] * (len(set(plain)) == len(runs)), short] if told_apart else []
    chosen = next(iter(candidates), list(runs))
    return [label if len(label) <= LONGEST else f"{label[: LONGEST - 5]}... {i}" for i, label in enumerate(chosen, 1)]


def markdown(results: Results) -> str:
    """The result as TensorBoard's text panel shows it: tables of numbers, of learning rates and of controls."""
    shown = [(name, cell) for name, cell in outcome(results).items() if name != "main metric"]
    for name, measure in results["measures"].items():
        if not measure["axes"]:
            shown.append((name, describe(of_judged(results, measure["values"]))))
    shown += [(f"ceiling: {name}", f"{value:.4g}") for name, value in results["ceilings"].items()]
    shown += list(results["cost"].items())
    rates = [(f"{rate:g}" + ", chosen" * chosen, cell) for rate, cell, chosen in grid(results)]
    checks = [
        (name, control["expected"], control["value"], "holds" if control["holds"] else "BROKEN")
        for name, control in results["controls"].items()
    ]
    parts = [
        f"status: {results['status']}",
        _table(("quantity", "interquartile mean [95 % interval]"), shown),
        _table(("learning rate", f"{results['tuning']['metric']} on the validation split"), rates) if rates else "",
        f"**{EDGE}**" if results["tuning"]["at_edge"] else "",
        _table(("control", "expected", "value", "outcome"), checks),
    ]
    return "\n\n".join(filter(None, parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def versions() -> dict[str, str | None]:
    """Versions of what decides a run's numbers; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _validate(results: Results) -> None:
    missing, unknown = set(KEYS) - set(results), set(results) - set(KEYS)
    if missing or unknown:
        raise ValueError(
            f"results must have exactly the keys {', '.join(KEYS)}; "
            f"missing: {sorted(missing)}, unknown: {sorted(unknown)}"
        )
    if results["status"] not in STATUSES:
        raise ValueError(f"results have the status {results['status']!r}; it must be one of {', '.join(STATUSES)}")
    for name, measure in results["measures"].items():
        shape = np.shape(measure["values"])
        expected = (len(results["members"]), *(len(values) for values in measure["axes"].values()))
        if shape != expected:
            raise ValueError(
                f"measure {name} has values of shape {shape}; {len(results['members'])} members and the axes "
                f"{list(measure['axes'])} need {expected}"
            )


def _plain(value: Any) -> Any:
    """The same value made of what strict JSON can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
