"""How a model is told where a token stands. Each scheme is one frozen object with the same three doors.

`embed` adds to the residual stream, `rotate` turns queries and keys, `bias` adds to scores. A scheme opens the doors it
uses; the others leave things as they are. What a scheme learns is made by it and owned by whoever passes it back in.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.attend import Bias
from seqlab.types import Stream

Number: TypeAlias = int | float
Positions: TypeAlias = Int[Array, "#B T"]
Heads: TypeAlias = Float[Array, "B T H K"]
Params: TypeAlias = Float[Array, "..."] | None
"""What a scheme has learned, the value of what it made; None where it learns nothing."""


@dataclass(frozen=True)
class Position:
    """The interface, every door shut."""

    name: ClassVar[str]
    """As the command line spells it."""
    sees_order: ClassVar[bool] = True
    """Whether a permutation of the tokens can be told from their positions."""
    absolute: ClassVar[bool] = False
    """Whether a common shift of all positions changes the outputs."""
    needs_attention: ClassVar[bool] = True
    """Whether it acts on queries and keys, and so does nothing in a model that has none."""

    @property
    def limit(self) -> int | None:
        """How many positions there are; None: any number."""
        return None

    def admit(self, length: int) -> None:
        """Raises ValueError where a sequence of this length has positions beyond the limit."""
        if self.limit is not None and length > self.limit:
            message = f"position={self.name} has {self.limit} positions; T={length} needs position.length={length}"
            raise ValueError(message)

    def stream_params(self, width: int, rngs: nnx.Rngs) -> nnx.Param | None:
        """What `embed` learns, for the model to own."""
        return None

    def score_params(self, heads: int, rngs: nnx.Rngs) -> nnx.Param | None:
        """What `bias` learns, for each attention to own."""
        return None

    def embed(self, x: Stream, positions: Positions, params: Params = None) -> Stream:
        return x

    def rotate(self, x: Heads, positions: Positions) -> Heads:
        return x

    def bias(self, heads: int, causal: bool, params: Params = None) -> Bias | None:
        """None: nothing is added."""
        return None


@dataclass(frozen=True)
class NoPosition(Position):
    """Tokens alone. A causal model can still infer order from its mask (Haviv et al. 2022); an encoder cannot."""

    name = "none"
    sees_order = False
    needs_attention = False


@dataclass(frozen=True)
class Sinusoidal(Position):
    """PE(p)[2i], PE(p)[2i+1] = sin, cos of p / base^(2i/D), added to the embeddings (Vaswani et al. 2017, sec. 3.5)."""

    base: Number = 10_000.0
    name = "sinusoidal"
    absolute = True
    needs_attention = False

    def __post_init__(self):
        _demand(self.base > 1, f"position.base={self.base} must be above 1")

    def embed(self, x: Stream, positions: Positions, params: Params = None) -> Stream:
        width = x.shape[-1]
        angles = _angles(positions, self.base ** (-2.0 * np.arange((width + 1) // 2) / width))
        pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        waves = pairs.reshape(*positions.shape, width + width % 2)[..., :width]
        return x + jnp.broadcast_to(waves, x.shape).astype(x.dtype)


@dataclass(frozen=True)
class Learned(Position):
    """A learned vector for each of `length` positions, added to the embeddings (Gehring et al. 2017, sec. 3.1).

    It starts as large as the embeddings of the tokens, from N(0, 1). A position beyond the table gives NaN: where
    lengths are known before, `admit` refuses it.

    Raises:
        ValueError: `length` is below 1.
    """

    length: int
    name = "learned"
    absolute = True
    needs_attention = False

    def __post_init__(self):
        _demand(self.length >= 1, f"position.length={self.length} must be at least 1")

    @property
    def limit(self) -> int:
        return self.length

    def stream_params(self, width: int, rngs: nnx.Rngs) -> nnx.Param:
        return nnx.Param(jax.random.normal(rngs.params(), (self.length, width)))

    def embed(self, x: Stream, positions: Positions, params: Params = None) -> Stream:
        assert params is not None, "made by `stream_params`"
        return x + jnp.broadcast_to(jnp.take(params, positions, axis=0, mode="fill"), x.shape)


@dataclass(frozen=True)
class RoPE(Position):
    """Turns each pair (x_i, x_{i + K/2}) by the angle p / base^(2i/K), so that scores depend on distance alone
    (Su et al. 2021, eq. 15; half-split pairing).
    """

    base: Number = 10_000.0
    name = "rope"

    def __post_init__(self):
        _demand(self.base > 1, f"position.base={self.base} must be above 1")

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
        _demand(
            width % 2 == 0,
            f"position={self.name} turns pairs of numbers, so the head width model.width / model.heads must be even, "
            f"not {width}",
        )
        angles = _angles(positions, self.frequencies(width))[:, :, None, :]  # B T 1 K/2
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = (self.stretch * jnp.broadcast_to(wave(angles), first.shape) for wave in (jnp.cos, jnp.sin))
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
        _demand(self.factor >= 1, f"position.factor={self.factor} must be at least 1")

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
        _demand(
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
        _demand(self.original_length >= 1, f"position.original_length={self.original_length} must be at least 1")
        _demand(
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


@dataclass(frozen=True)
class ALiBi(Position):
    """Adds -m_h |i - j| to the scores of head h, m_h = 2^(-8 h / H) (Press et al. 2022, sec. 3).

    Where H is no power of two, the slopes of the power of two below are followed by every other one of those of twice
    that many, as in the code released with the paper.
    """

    name = "alibi"

    @staticmethod
    def slopes(heads: int) -> np.ndarray:
        whole = 2 ** int(math.log2(heads))
        between = 2.0 ** (-8 * np.arange(1, 2 * whole + 1, 2) / (2 * whole))
        return np.append(2.0 ** (-8 * np.arange(1, whole + 1) / whole), between[: heads - whole])

    def bias(self, heads: int, causal: bool, params: Params = None) -> Bias:
        slopes = jnp.asarray(self.slopes(heads), jnp.float32)

        def far(query: Int[Array, "#B T"], key: Int[Array, "#B S"]) -> Float[Array, "#B H T S"]:
            distance = jnp.abs(query[:, None, :, None] - key[:, None, None, :]).astype(jnp.float32)
            return -slopes[None, :, None, None] * distance

        return far


@dataclass(frozen=True)
class T5(Position):
    """Adds a learned number for each head and bucket of distances to the scores (Raffel et al. 2020, sec. 2.1).

    Half of the buckets hold one distance each, the others grow in geometric progression up to `max_distance`, and the
    last holds all beyond it. An encoder has half of its buckets for keys before the query and half for those after it.

    Raises:
        ValueError: `num_buckets` is odd or below 4, or `max_distance` within the distances that have one each.
    """

    num_buckets: int = 32
    max_distance: int = 128
    name = "t5"

    def __post_init__(self):
        buckets = self.num_buckets
        _demand(buckets >= 4 and buckets % 2 == 0, f"position.num_buckets={buckets} must be even and at least 4")
        _demand(
            self.max_distance > buckets // 2,
            f"position.max_distance={self.max_distance} must be above half of position.num_buckets={buckets}",
        )

    def buckets(self, causal: bool) -> np.ndarray:
        """The bucket of each distance 0..max_distance, on one side of the query."""
        count = self.num_buckets if causal else self.num_buckets // 2
        single = count // 2
        growing = count - single
        starts = single * (self.max_distance / single) ** (np.arange(1, growing) / growing)
        distance = np.arange(self.max_distance + 1)
        # a bucket that starts at a whole number holds it, however the power is rounded
        grown = single + np.searchsorted(starts * (1 - 1e-12), distance, side="right")
        return np.where(distance < single, distance, grown)

    def score_params(self, heads: int, rngs: nnx.Rngs) -> nnx.Param:
        start = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")  # as T5X has it (Roberts et al. 2022)
        return nnx.Param(start(rngs.params(), (self.num_buckets, heads)))

    def bias(self, heads: int, causal: bool, params: Params = None) -> Bias:
        assert params is not None, "made by `score_params`"
        side = self.buckets(causal)
        # by distance from the query, -max_distance .. max_distance; causal attention has no use for the second half
        after = side[1:] if causal else side[1:] + self.num_buckets // 2
        table = params.astype(jnp.float32)[np.append(side[::-1], after)]

        def by_bucket(query: Int[Array, "#B T"], key: Int[Array, "#B S"]) -> Float[Array, "#B H T S"]:
            distance = jnp.clip(key[:, None, :] - query[:, :, None], -self.max_distance, self.max_distance)
            return jnp.moveaxis(table[distance + self.max_distance], -1, 1)

        return by_bucket


def _angles(positions: Positions, frequencies: np.ndarray) -> Float[Array, "#B T count"]:
    return positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)[None, None]


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
