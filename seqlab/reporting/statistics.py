"""What a population says: interquartile means, solve rates, probabilities of improvement, and their 95 % intervals.

The definitions are rliable's (Agarwal et al. 2021, arXiv:2108.13264). A member that diverged has no number: it is left
out of a mean, beside which stands how many diverged, and counts as the worst wherever one thing is said to be better
than another.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float
from scipy import stats

Members: TypeAlias = Any
"""What `np.asarray` takes (numpy, JAX, lists with None for a missing number), the member axis P first."""

CONFIDENCE = 0.95
RESAMPLES = 9999
BATCH = 2_000_000
"""Numbers that are resampled at once."""


class Spread(NamedTuple):
    """Mean, lowest and highest over the members; NaN where no member is finite."""

    mean: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]


class Estimate(NamedTuple):
    """A number and its 95 % interval, which is NaN where there are fewer than two members to resample."""

    value: np.ndarray | np.floating
    low: np.ndarray | np.floating
    high: np.ndarray | np.floating

    def __str__(self) -> str:
        """One cell of a table: `0.982 [0.97, 0.991]`, or the number alone where it has no interval."""
        interval = f" [{self.low:.4g}, {self.high:.4g}]" if np.isfinite(self.low) else ""
        return f"{self.value:.4g}{interval}"


def spread(values: Members) -> Spread:
    """Reduces the member axis of `values` ([P, ...]); members that are NaN, infinite or None are left out."""
    finite = np.ma.masked_invalid(np.asarray(values, dtype=np.float64))
    return Spread(*(np.ma.filled(reduced(axis=0), np.nan) for reduced in (finite.mean, finite.min, finite.max)))


def interquartile_mean(*strata: Members) -> Estimate:
    """The mean of the middle half of all members, the strata together, and its stratified bootstrap interval.

    Args:
        strata: the values of the members of one task each, [P, ...]; what is NaN, infinite or None is left out.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in strata]
    columns = np.concatenate([array.reshape(len(array), -1) for array in arrays])
    stratum = np.repeat(range(len(arrays)), [len(array) for array in arrays])
    found = np.full((3, columns.shape[1]), np.nan)
    patterns, pattern = np.unique(np.isfinite(columns), axis=1, return_inverse=True)
    for i, finite in enumerate(patterns.T):  # columns that lack the same members are resampled together
        alike = pattern.ravel() == i
        samples = [columns[finite & (stratum == k)][:, alike] for k in range(len(arrays))]
        samples = [sample for sample in samples if len(sample)]
        if samples:
            found[:, alike] = bootstrap(middle_half, samples)
    return Estimate(*found.reshape(3, *arrays[0].shape[1:]))


def middle_half(*samples: np.ndarray, axis: int) -> np.ndarray:
    """The mean of all samples without a quarter of them at either end, which is rounded down to whole numbers."""
    return np.asarray(stats.trim_mean(np.concatenate(samples, axis), 0.25, axis=axis))


def describe(values: Members) -> str:
    """The interquartile mean of values of shape [P] as one cell of a table."""
    return str(interquartile_mean(values)) if np.size(values) else "-"


def bootstrap(statistic: Callable[..., np.ndarray], samples: Sequence[np.ndarray]) -> Estimate:
    """A statistic of samples ([members, ...] each) with its percentile interval, every sample resampled on its own.

    Args:
        statistic: reduces the axis that `axis=` names of arrays like the samples.
    """
    value = statistic(*samples, axis=0)
    if min(map(len, samples)) < 2:
        return Estimate(value, *np.full((2, *np.shape(value)), np.nan))
    found = stats.bootstrap(
        samples,
        statistic,
        axis=0,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH // sum(map(np.size, samples)) // max(map(len, samples))),
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return Estimate(value, found.confidence_interval.low, found.confidence_interval.high)


def ranked(values: Members, higher_is_better: bool) -> Float[np.ndarray, "..."]:
    """Numbers of which more is better; whoever has none stands below all."""
    values = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(values), values if higher_is_better else -values, -np.inf)


def probability_of_improvement(xs: Sequence[np.ndarray], ys: Sequence[np.ndarray]) -> Estimate:
    """How likely a random member of X is better than a random one of Y, on a random task: the mean over tasks of
    (#{x > y} + #{x = y} / 2) / (N M), the Mann-Whitney U statistic over its maximum.

    Args:
        xs: for each task the `ranked` scores [N] of the members of X.
        ys: for the same tasks those of Y, [M].
    """

    def probability(*samples: np.ndarray, axis: int) -> np.ndarray:
        samples = tuple(np.moveaxis(sample, axis, -1) for sample in samples)
        pairs = [
            (x[..., :, None], y[..., None, :]) for x, y in zip(samples[: len(xs)], samples[len(xs) :], strict=True)
        ]
        return np.asarray(np.mean([((x > y) + 0.5 * (x == y)).mean((-2, -1)) for x, y in pairs], axis=0))

    return bootstrap(probability, [*xs, *ys])


def solve_rate(solved: int, members: int) -> Estimate:
    """The share of members that solved their task, with the exact interval of Clopper and Pearson (1934)."""
    interval = stats.binomtest(solved, members).proportion_ci(CONFIDENCE, method="exact")
    return Estimate(np.float64(solved / members), np.float64(interval.low), np.float64(interval.high))


def steps_to_solve(solved_at: Sequence[int | None]) -> float:
    """The median over all members; infinite where it lies among those that did not solve their task (None)."""
    return float(np.median([np.inf if step is None else step for step in solved_at]))
