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
        demand(self.base > 1, f"position.base={self.base} must be above 1")

    def embed(self, x: Stream, positions: Positions, params: Params = None) -> Stream:
        width = x.shape[-1]
        turns = angles(positions, self.base ** (-2.0 * np.arange((width + 1) // 2) / width))
        pairs = jnp.stack([jnp.sin(turns), jnp.cos(turns)], axis=-1)
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
        demand(self.length >= 1, f"position.length={self.length} must be at least 1")

    @property
    def limit(self) -> int:
        return self.length

    def stream_params(self, width: int, rngs: nnx.Rngs) -> nnx.Param:
        return nnx.Param(jax.random.normal(rngs.params(), (self.length, width)))

    def embed(self, x: Stream, positions: Positions, params: Params = None) -> Stream:
        assert params is not None, "made by `stream_params`"
        return x + jnp.broadcast_to(jnp.take(params, positions, axis=0, mode="fill"), x.shape)


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
        demand(buckets >= 4 and buckets % 2 == 0, f"position.num_buckets={buckets} must be even and at least 4")
        demand(
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


def angles(positions: Positions, frequencies: np.ndarray) -> Float[Array, "#B T count"]:
    """How far each wave or pair has turned at each position."""
    return positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)[None, None]


def demand(condition: bool, message: str) -> None:
    """Raises ValueError with the message where the condition does not hold."""
    if not condition:
        raise ValueError(message)
