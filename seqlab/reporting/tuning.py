"""The learning rate that a run is judged by, and what the members trained with it came to.

It is chosen on the validation split; what is shown of its members was measured on the test split.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from seqlab.reporting.statistics import Members, describe, middle_half, ranked, solve_rate, steps_to_solve

Tuning: TypeAlias = dict[str, Any]
Results: TypeAlias = dict[str, Any]

NEAR = 0.05
"""Share of the best score that a rate of the working window may lack."""
EDGE = "tuned at the edge: widen the grid"


def untuned(metric: str, higher_is_better: bool, learning_rates: Sequence[float]) -> Tuning:
    """What is known before training."""
    return {
        "metric": metric,
        "higher_is_better": higher_is_better,
        "learning_rates": list(learning_rates),
        "validation": [],
        "learning_rate": None,
        "score": None,
        "at_edge": False,
        "window_decades": None,
    }


def tuned(tuning: Tuning, validation: Members) -> Tuning:
    """With the rate whose seeds have the best interquartile mean on the validation split, given their scores [R, S].

    A seed that diverged (NaN) counts as the worst. Of rates that score the same the one with more living seeds is
    taken, and then the middle one; none where every seed of every rate diverged.
    """
    rates = np.asarray(tuning["learning_rates"], np.float64)
    validation = np.asarray(validation, np.float64)
    order = np.argsort(rates)
    scores = rate_scores(validation, tuning["higher_is_better"])[order]
    living = np.isfinite(validation).sum(axis=1)[order]
    if not living.any():
        return tuning | {"validation": validation.tolist()}
    best = scores == scores.max()
    tied = np.flatnonzero(best & (living == living[best].max()))
    chosen = int(tied[(len(tied) - 1) // 2])
    near = np.isfinite(scores) & (scores >= scores.max() - NEAR * abs(scores.max()))
    low, high = chosen, chosen
    while low > 0 and near[low - 1]:
        low -= 1
    while high < len(rates) - 1 and near[high + 1]:
        high += 1
    return tuning | {
        "validation": validation.tolist(),
        "learning_rate": float(rates[order][chosen]),
        "score": float(scores[chosen] if tuning["higher_is_better"] else -scores[chosen]),
        "at_edge": len(rates) > 1 and chosen in (0, len(rates) - 1),
        "window_decades": float(np.log10(rates[order][high] / rates[order][low])),
    }


def rate_scores(validation: Float[np.ndarray, "R S"], higher_is_better: bool) -> Float[np.ndarray, " R"]:
    """What rates are ranked by, more being better: minus infinity where too many seeds diverged for a mean."""
    return middle_half(ranked(validation, higher_is_better), axis=1)


def judged(results: Results) -> Int[np.ndarray, " M"]:
    """The members that a run is judged by: those of the chosen learning rate, or all where none was chosen."""
    rate = results["tuning"]["learning_rate"]
    return np.array([i for i, m in enumerate(results["members"]) if rate in (None, m["learning_rate"])], np.int64)


def of_judged(results: Results, values: Members) -> np.ndarray:
    """The part of values [P, ...] that is theirs."""
    return np.asarray(values, np.float64)[judged(results)]


def main_scores(results: Results) -> Float[np.ndarray, " M"] | None:
    """The main metric of the judged members on the test split; None where nothing was measured."""
    values = [member["metrics"].get(results["tuning"]["metric"], np.nan) for member in results["members"]]
    measured = any(member["metrics"] for member in results["members"])
    return of_judged(results, values) if measured else None


def grid(results: Results) -> list[tuple[float, str, bool]]:
    """For each learning rate, from the lowest: the rate, its validation scores, whether it was chosen.

    Empty where there was nothing to choose from.
    """
    tuning = results["tuning"]
    if len(tuning["validation"]) < 2:
        return []
    rows = []
    rates = [np.inf if rate is None else rate for rate in tuning["learning_rates"]]  # JSON has no infinity
    for rate, scores in sorted(zip(rates, tuning["validation"], strict=True)):
        diverged = int((~np.isfinite(np.asarray(scores, np.float64))).sum())
        cell = describe(scores) + f", {diverged} of {len(scores)} diverged" * bool(diverged)
        rows.append((rate, cell, rate == tuning["learning_rate"]))
    return rows


def outcome(results: Results) -> dict[str, str]:
    """What the judged members came to, as the cells of a table that every report shows."""
    members = [results["members"][i] for i in judged(results)]
    scores, rate = main_scores(results), results["tuning"]["learning_rate"]
    # A member that solved its task and diverged afterwards has nothing to show for it.
    solved_at = [None if m["status"] == "diverged" else m["solved_at"] for m in members]
    solvable = (results["config"].get("train") or {}).get("solved") is not None and bool(
        results["tuning"]["validation"]
    )
    solved = sum(step is not None for step in solved_at)
    steps = steps_to_solve(solved_at) if solvable else np.inf
    return {
        "main metric": "-" if scores is None else describe(scores),
        "diverged": f"{sum(m['status'] == 'diverged' for m in members)} of {len(members)}",
        "solved": f"{solved} of {len(members)}, {solve_rate(solved, len(members))}" if solvable else "-",
        "steps to solve": f"{steps:,.0f}" if np.isfinite(steps) else "-",
        "learning rate": "-" if rate is None else f"{rate:g}" + f", {EDGE}" * results["tuning"]["at_edge"],
    }
