"""What a population says: its mean and its spread."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

Members: TypeAlias = Any
"""What `np.asarray` takes (numpy, JAX, lists with None for a missing number), the member axis P first."""


class Spread(NamedTuple):
    """Mean, lowest and highest over the members; NaN where no member is finite."""

    mean: Float[np.ndarray, "..."]
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]


def spread(values: Members) -> Spread:
    """Reduces the member axis of `values` ([P, ...]); members that are NaN, infinite or None are left out."""
    finite = np.ma.masked_invalid(np.asarray(values, dtype=np.float64))
    return Spread(*(np.ma.filled(reduced(axis=0), np.nan) for reduced in (finite.mean, finite.min, finite.max)))


def describe(values: Members) -> str:
    """One cell of a table, for values of shape [P]: `0.982 [0.97, 0.991]`, or the number alone of a single member."""
    mean, low, high = spread(values)
    if np.size(values) == 1:
        return f"{mean:.4g}"
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"
