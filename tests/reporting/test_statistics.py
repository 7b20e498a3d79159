"""Statistics against their definitions spelled out, other formulas for the same, and what they promise: coverage."""

import itertools

import numpy as np
import pytest
from scipy import stats

from seqlab.reporting.statistics import (
    Estimate,
    bootstrap,
    describe,
    interquartile_mean,
    middle_half,
    probability_of_improvement,
    ranked,
    solve_rate,
    spread,
    steps_to_solve,
)

RNG = np.random.default_rng(0)


def test_spread_leaves_out_members_that_are_not_finite():
    mean, low, high = spread([[1.0, None], [2.0, np.nan], [6.0, np.inf]])
    assert (mean[0], low[0], high[0]) == (3.0, 1.0, 6.0)
    assert np.isnan([mean[1], low[1], high[1]]).all()


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 7, 8, 10, 12])
def test_the_interquartile_mean_leaves_a_quarter_out_at_either_end(members):
    values = RNG.normal(size=members)
    cut = members // 4
    by_hand = np.mean(sorted(values)[cut : members - cut])
    assert interquartile_mean(values).value == pytest.approx(by_hand, rel=1e-12)  # another order of summation


def test_the_interval_is_that_of_all_resamples():
    """Of four members there are 256 resamples: their quantiles are the bootstrap's without its chance."""
    values = np.array([0.1, 0.4, 0.5, 0.9])
    all_means = [np.mean(sorted(sample)[1:3]) for sample in itertools.product(values, repeat=4)]
    low, high = np.percentile(all_means, [2.5, 97.5])
    assert interquartile_mean(values)[1:] == (pytest.approx(low), pytest.approx(high))  # both are values among few


def test_strata_are_resampled_each_on_its_own():
    """With one task at 0 and another at 1 a plain bootstrap would draw more of the one; a stratified one cannot."""
    low_task, high_task = np.zeros(4), np.ones(4)
    assert interquartile_mean(low_task, high_task) == (0.5, 0.5, 0.5)
    pooled = interquartile_mean(np.concatenate([low_task, high_task]))
    assert pooled.low < 0.25 and pooled.high > 0.75


def test_columns_are_reduced_each_with_the_members_it_has():
    values = RNG.normal(size=(6, 3))
    values[0, 1] = np.nan
    values[:, 2] = np.nan
    value, low, high = interquartile_mean(values)
    alone = interquartile_mean(values[:, 0])
    assert (value[0], low[0], high[0]) == (alone.value, alone.low, alone.high)
    fewer = interquartile_mean(values[1:, 1])
    assert (value[1], low[1], high[1]) == (fewer.value, fewer.low, fewer.high)
    assert np.isnan([value[2], low[2], high[2]]).all()


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        ([0.25], "0.25"),
        ([0.25, 0.75, np.nan], "0.5 [0.25, 0.75]"),  # a quarter of all resamples holds the lower one only
        ([0.5, 0.5, 0.5], "0.5 [0.5, 0.5]"),
        ([0.25, None], "0.25"),
        ([None, np.inf], "nan"),
        ([], "-"),
    ],
)
def test_a_cell_of_a_table(values, cell):
    assert describe(values) == cell


def test_nineteen_of_twenty_intervals_hold_the_truth():
    """400 populations of 20 at once. The percentile bootstrap is known to be a little narrow at such sizes."""
    populations = RNG.normal(size=(20, 400))
    _, low, high = interquartile_mean(populations)
    covered = ((low <= 0) & (high >= 0)).mean()
    assert 0.88 < covered < 0.97


def naive_probability(x, y):
    """rliable's `probability_of_improvement`: the Mann-Whitney U of each task, averaged."""
    tasks = [
        0.5 if np.array_equal(a, b) else stats.mannwhitneyu(a, b, alternative="greater").statistic / (len(a) * len(b))
        for a, b in zip(x, y, strict=True)
    ]
    return np.mean(tasks)


def counted_probability(x, y):
    """The same by its definition, pair by pair."""
    return np.mean([np.mean([(a > b) + 0.5 * (a == b) for a in u for b in v]) for u, v in zip(x, y, strict=True)])


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_probability_of_improvement_is_that_of_rliable(tasks):
    x = [RNG.integers(0, 6, size=5).astype(float) for _ in range(tasks)]  # with ties
    y = [RNG.integers(0, 5, size=7).astype(float) for _ in range(tasks)]
    assert probability_of_improvement(x, y).value == pytest.approx(naive_probability(x, y), rel=1e-12)
    assert probability_of_improvement(x, y).value == pytest.approx(counted_probability(x, y), rel=1e-12)


def test_its_interval_is_that_of_a_stratified_bootstrap_by_hand():
    x = [RNG.normal(0.5, 1, size=6), RNG.normal(0.5, 1, size=4)]
    y = [RNG.normal(size=5), RNG.normal(size=8)]
    rng = np.random.default_rng(1)

    def resampled(scores):
        return [rng.choice(task, size=len(task)) for task in scores]

    found = [counted_probability(resampled(x), resampled(y)) for _ in range(2000)]
    low, high = np.percentile(found, [2.5, 97.5])
    estimate = probability_of_improvement(x, y)
    # of a quantile at 2.5 % of 2000 draws with a standard deviation of about .1: some thousandths, five times
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=0.03), pytest.approx(high, abs=0.03))


def test_who_always_wins_wins_surely_and_equals_are_even():
    low, high = np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5])
    assert probability_of_improvement([high], [low]) == (1, 1, 1)
    assert probability_of_improvement([low], [high]) == (0, 0, 0)
    assert probability_of_improvement([np.ones(4)], [np.ones(3)]) == (0.5, 0.5, 0.5)
    alone = probability_of_improvement([np.ones(1)], [np.zeros(3)])
    assert alone.value == 1 and np.isnan(alone.low)


def test_whoever_diverged_is_worse_than_all():
    accuracy, bits = [0.5, None, 0.0], [2.0, np.nan, 9.0]
    assert list(np.argsort(ranked(accuracy, True))) == [1, 2, 0]
    assert list(np.argsort(ranked(bits, False))) == [1, 2, 0]
    x, y = ranked([0.9, 0.9, 0.9, np.nan], True), ranked([0.1] * 4, True)
    assert probability_of_improvement([x], [y]).value == 0.75
    assert probability_of_improvement([ranked([np.nan] * 2, True)], [ranked([np.nan] * 2, True)]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("solved", "members"), [(0, 4), (3, 4), (4, 4), (7, 10), (0, 1)])
def test_the_interval_of_a_solve_rate_is_of_beta_quantiles(solved, members):
    low = stats.beta.ppf(0.025, solved, members - solved + 1) if solved else 0
    high = stats.beta.ppf(0.975, solved + 1, members - solved) if solved < members else 1
    # both are found by iteration, to about 1e-9
    assert solve_rate(solved, members) == (
        solved / members,
        pytest.approx(low, rel=1e-6),
        pytest.approx(high, rel=1e-6),
    )


def test_who_does_not_solve_it_takes_longer_than_all():
    assert steps_to_solve([400, 200, 600]) == 400
    assert steps_to_solve([400, 200, None]) == 400
    assert steps_to_solve([400, None]) == np.inf
    assert steps_to_solve([None]) == np.inf


def test_the_same_numbers_have_the_same_interval():
    values = RNG.normal(size=9)
    assert interquartile_mean(values) == interquartile_mean(values)
    assert bootstrap(middle_half, [values]) == interquartile_mean(values)
    assert str(Estimate(np.float64(0.5), np.float64(0.25), np.float64(1))) == "0.5 [0.25, 1]"
