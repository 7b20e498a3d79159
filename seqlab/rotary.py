"""Rotary positions: queries and keys turn with their position, each pair of numbers at a frequency of its own.

How a longer sequence is fitted into the angles that were trained on is a choice of frequencies, a subclass each.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from seqlab.positions import Heads, Number, Position, Positions, angles, demand


@dataclass(frozen=True)
class RoPE(Position):
    """Turns each pair (x_i, x_{i + K/2}) by the angle p / base^(2i/K), so that scores depend on distance alone
    (Su et al. 2021, eq. 15; half-split pairing).
    """

    base: Number = 10_000.0
    name = "rope"

    def __post_init__(self):
        demand(self.base > 1, f"position.base={self.base} must be above 1")

    def frequencies(self, width: int) -> np.ndarray:
        """The angle by which each of the K/2 pairs turns from one position to the next."""
        return self.base ** (-2.0 * np.arange(width // 2) / width)

    @property
    def stretch(self) -> Number:
        """What queries and keys are multiplied by."""
        return 1.0

    def rotate(self, x: Heads, positions: Positions) -> Heads:
        """Raises ValueError where the head width K is odd."""
        width = x.shape[-1]
        demand(
            width % 2 == 0,
            f"position={self.name} turns pairs of numbers, so the head width model.width / model.heads must be even, "
            f"not {width}",
        )
        turns = angles(positions, self.frequencies(width))[:, :, None, :]  # B T 1 K/2
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = (self.stretch * jnp.broadcast_to(wave(turns), first.shape) for wave in (jnp.cos, jnp.sin))
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


@dataclass(frozen=True)
class LinearRoPE(RoPE):
    """RoPE at positions divided by `factor`: `factor` times as many fit the angles seen (Chen et al. 2023, eq. 4).

    Raises:
        ValueError: `factor` is below 1.
    """

    factor: Number = 4.0
    name = "rope_linear"

    def __post_init__(self):
        super().__post_init__()
        demand(self.factor >= 1, f"position.factor={self.factor} must be at least 1")

    def frequencies(self, width: int) -> np.ndarray:
        return super().frequencies(width) / self.factor


@dataclass(frozen=True)
class NTKRoPE(LinearRoPE):
    """RoPE with base' = base factor^(K/(K-2)): the slowest pair is slowed by `factor`, the fastest not at all
    (the NTK-aware scaling of Peng et al. 2023, sec. 3.1).
    """

    name = "rope_ntk"

    def frequencies(self, width: int) -> np.ndarray:
        """Raises ValueError where there is a single pair, at once the slowest and the fastest."""
        demand(
            width >= 4,
            f"position={self.name} needs a head width model.width / model.heads of at least 4, not {width}",
        )
        return RoPE(self.base * self.factor ** (width / (width - 2))).frequencies(width)


@dataclass(frozen=True)
class YaRN(LinearRoPE):
    """RoPE in which a pair that makes more than `beta_fast` turns within the `original_length` keeps its speed, one
    that makes less than `beta_slow` is slowed by `factor`, and the pairs between share out the difference
    (Peng et al. 2023, secs. 3.2-3.4).

    Scores are multiplied by (0.1 ln factor + 1)^2. The ramp is linear in the index of the pair and starts and ends at a
    whole one, as in the code released with the paper; the text has it linear in the number of turns.

    Raises:
        ValueError: `factor` or `original_length` is below 1, or `beta_fast` is not above `beta_slow`.
    """

    original_length: int = 128
    beta_fast: Number = 32
    beta_slow: Number = 1
    name = "yarn"

    def __post_init__(self):
        super().__post_init__()
        demand(self.original_length >= 1, f"position.original_length={self.original_length} must be at least 1")
        demand(
            self.beta_fast > self.beta_slow > 0,
            f"position.beta_fast={self.beta_fast} must be above position.beta_slow={self.beta_slow}, and both above 0",
        )

    def frequencies(self, width: int) -> np.ndarray:
        fast = RoPE(self.base).frequencies(width)

        def pair(turns: Number) -> float:
            """The (fractional) index of the pair that makes so many turns within the original length."""
            return width / 2 * math.log(self.original_length / (2 * math.pi * turns), self.base)

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), width - 1)
        slowed = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
        return fast * (1 - slowed) + fast / self.factor * slowed

    @property
    def stretch(self) -> Number:
        return 0.1 * math.log(self.factor) + 1
