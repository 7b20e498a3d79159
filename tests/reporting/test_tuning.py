"""Which learning rate is chosen, and what is then said of its members."""

import numpy as np
import pytest

from seqlab.reporting.tuning import EDGE, grid, judged, main_scores, of_judged, outcome, tuned, untuned

RATES = (3e-4, 1e-3, 3e-3)


def choose(validation, rates=RATES, higher_is_better=True):
    return tuned(untuned("accuracy", higher_is_better, rates), validation)


def results(tuning, test=None, status=None, solved_at=None, solved=0.9):
    """Those of two seeds a rate."""
    rates = tuning["learning_rates"]
    test, status, solved_at = (
        values or [default] * 2 * len(rates)
        for values, default in ((test, 0.5), (status, "finished"), (solved_at, None))
    )
    members = [
        {"learning_rate": rate, "metrics": {"accuracy": test[i]}, "status": status[i], "solved_at": solved_at[i]}
        for i, rate in enumerate(np.repeat(rates, 2).tolist())
    ]
    return {"tuning": tuning, "members": members, "config": {"train": {"solved": solved}}}


def test_the_best_interquartile_mean_is_chosen():
    # the mean and the best seed of the last rate are the highest, but three quarters of its seeds are worse
    validation = [[0.1] * 4, [0.5, 0.5, 0.6, 0.6], [0.4, 0.4, 0.4, 2.0]]
    tuning = choose(validation)
    assert (tuning["learning_rate"], tuning["at_edge"]) == (1e-3, False)
    assert tuning["score"] == pytest.approx(0.55)
    assert tuning["validation"] == validation


def test_less_may_be_better():
    tuning = choose([[3.0], [2.0], [2.5]], higher_is_better=False)
    assert (tuning["learning_rate"], tuning["score"]) == (1e-3, 2.0)


@pytest.mark.parametrize(
    ("validation", "chosen", "at_edge"),
    [
        ([[0.9], [0.5], [0.5]], 3e-4, True),
        ([[0.5], [0.5], [0.9]], 3e-3, True),
        ([[0.5], [0.9], [0.5]], 1e-3, False),
        ([[1.0], [1.0], [1.0]], 1e-3, False),  # the middle of what is tied
        ([[0.5], [1.0], [1.0]], 1e-3, False),
    ],
)
def test_a_best_rate_at_the_edge_is_flagged(validation, chosen, at_edge):
    tuning = choose(validation)
    assert (tuning["learning_rate"], tuning["at_edge"]) == (chosen, at_edge)
    assert (EDGE in outcome(results(tuning, test=[0.5] * 6))["learning rate"]) == at_edge


def test_the_order_in_which_rates_were_typed_does_not_matter():
    tuning = choose([[0.9], [0.1], [0.5]], rates=(1e-3, 3e-3, 3e-4))
    assert (tuning["learning_rate"], tuning["at_edge"]) == (1e-3, False)


def test_a_single_rate_has_no_edge():
    tuning = choose([[0.5, 0.7]], rates=(1e-3,))
    assert (tuning["learning_rate"], tuning["at_edge"], tuning["window_decades"]) == (1e-3, False, 0)
    assert grid(results(tuning)) == []


def test_a_seed_that_diverged_counts_as_the_worst():
    # two of four living at 1.0 would win by a mean of the living
    tuning = choose([[0.6] * 4, [0.7] * 4, [1.0, 1.0, np.nan, np.nan]])
    assert tuning["learning_rate"] == 1e-3
    # one of four is within the quarter that is left out, and the rest pays for it
    tuning = choose([[0.6] * 4, [0.7] * 4, [1.0, 1.0, 0.5, np.nan]])
    assert (tuning["learning_rate"], tuning["score"]) == (3e-3, 0.75)
    # where too many diverged everywhere, what lives
    assert choose([[np.nan, np.nan], [np.nan, 0.1], [np.nan, np.nan]])["learning_rate"] == 1e-3
    assert choose([[np.nan, np.nan]] * 3)["learning_rate"] is None


@pytest.mark.parametrize(
    ("scores", "decades"),
    [
        ([0.5, 0.96, 1.0, 0.97, 0.2], 2),  # three rates, a decade apart
        ([0.96, 0.5, 1.0, 0.5, 0.96], 0),  # what is not next to the best does not count
        ([1.0] * 5, 4),
    ],
)
def test_the_working_window_in_decades(scores, decades):
    rates = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    assert choose([[score] for score in scores], rates)["window_decades"] == pytest.approx(decades)
    assert choose([[1 / score] for score in scores], rates, False)["window_decades"] == pytest.approx(decades)


def test_a_run_is_judged_by_the_members_of_the_chosen_rate():
    run = results(choose([[0.1, 0.1], [0.9, 0.8], [0.2, 0.2]]), test=[1.0, 1.0, 0.3, 0.4, 1.0, 1.0])
    assert judged(run).tolist() == [2, 3]
    assert main_scores(run).tolist() == [0.3, 0.4]  # not the best on the test split
    assert of_judged(run, np.arange(12).reshape(6, 2)).tolist() == [[4, 5], [6, 7]]
    assert outcome(run)["main metric"] == "0.35 [0.3, 0.4]"
    assert [(rate, chosen) for rate, _, chosen in grid(run)] == [(3e-4, False), (1e-3, True), (3e-3, False)]


def test_before_a_rate_is_chosen_it_is_judged_by_all():
    run = results(untuned("accuracy", True, RATES))
    assert judged(run).tolist() == list(range(6))
    assert outcome(run)["learning rate"] == outcome(run)["solved"] == outcome(run)["steps to solve"] == "-"
    assert grid(run) == []


def test_what_was_solved_and_when():
    tuning = choose([[0.1, 0.1], [0.9, 0.8], [0.2, 0.2]])
    cells = outcome(results(tuning, solved_at=[1, 1, 400, 600, 1, 1]))
    assert cells["solved"].startswith("2 of 2, 1 [0.158") and cells["steps to solve"] == "500"
    status = ["finished"] * 3 + ["diverged"] + ["finished"] * 2
    cells = outcome(results(tuning, solved_at=[1, 1, 400, 600, 1, 1], status=status))
    assert cells["solved"].startswith("1 of 2, 0.5") and cells["steps to solve"] == "-"  # solved, then diverged
    assert cells["diverged"] == "1 of 2"
    assert outcome(results(tuning, solved=None))["solved"] == "-"


def test_the_grid_says_how_many_diverged():
    run = results(choose([[0.1, 0.1], [0.9, 0.8], [0.2, None]]))
    assert grid(run)[2] == (3e-3, "0.2, 1 of 2 diverged", False)
