"""The alphabet of seqlab and the things that travel between its rooms.

B  batch                    D  model width             V  vocabulary
T  time (query position)    H  heads                   L  layers
S  source (key) position    K  head width              P  population member (seed x learning rate)
Q  scored position          N  state size per layer
"""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

Split: TypeAlias = Literal["train", "valid", "test"]
PRNGKey: TypeAlias = Key[Array, ""]
Stream: TypeAlias = Float[Array, "B T D"]
Segments: TypeAlias = Int[Array, "B T"] | None
"""Which sequence each token of a row belongs to: equal numbers are one sequence, 0 is padding. None: one a row."""
State: TypeAlias = Any
"""What a causal mixer carries from one token to the next: a pytree whose leaves start with the batch axis."""


@struct.dataclass
class Places:
    """Where tokens stand. One row may stand for all."""

    positions: Int[Array, "#B T"]
    """Within their sequence, from 0."""
    segments: Int[Array, "#B T"] | None = None

    @classmethod
    def along(cls, length: int, first: Int[Array, " B"] | None = None) -> "Places":
        """One sequence a row, from position `first` (0) on."""
        index = jnp.arange(length)[None]
        return cls(index if first is None else first[:, None] + index)

    @classmethod
    def of(cls, segments: Int[Array, "B T"], first: Int[Array, " B"] | None = None) -> "Places":
        """Counts the tokens of each sequence, the first one of a row from `first` (0) on; padding is not counted.

        Tokens of one sequence stand in one run, but for padding among them.
        """
        count = jnp.cumsum(segments > 0, axis=1)
        start = starts(segments)
        positions = jnp.maximum(count - jax.lax.cummax(jnp.where(start, count, 1), axis=1), 0)
        if first is not None:
            positions += jnp.where(jnp.cumsum(start, axis=1) == 0, first[:, None], 0)
        return cls(positions, segments)


def starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a token's sequence is another than that of the token before it; the first token of a row is no start."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
    last = jax.lax.cummax(jnp.where(segments > 0, index, -1), axis=1)  # the newest token so far
    last = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    before = jnp.take_along_axis(segments, jnp.maximum(last, 0), axis=1)
    return (segments > 0) & (last >= 0) & (segments != before)


@struct.dataclass
class Batch:
    """Examples and what is scored in them: logits are computed at the Q scored positions only."""

    inputs: Int[Array, "B T"]
    scored: Int[Array, "B Q"]
    """The positions in `inputs` at which the model must name a target."""
    targets: Int[Array, "B Q"]
    weights: Float[Array, "B Q"]
    labels: dict[str, Int[Array, "B Q"]]
    """What a curve is drawn over: gap, pair index, role, ..."""
    segments: Segments = None


@struct.dataclass
class Curve:
    """One measured quantity: an array with one axis for each entry of `axes`, none for a plain number."""

    values: Float[Array, "..."]
    axes: tuple[tuple[str, tuple], ...] = struct.field(pytree_node=False, default=())
    """Pairs (name of the axis, its values), for instance (("gap", (1, 3, 5)),)."""
