"""The alphabet of seqlab and the two things that travel between its rooms.

B  batch                    D  model width             V  vocabulary
T  time (query position)    H  heads                   L  layers
S  source (key) position    K  head width              P  population member (seed x learning rate)
Q  scored position          N  state size per layer
"""

from typing import Any, Literal, TypeAlias

from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

Split: TypeAlias = Literal["train", "valid", "test"]
PRNGKey: TypeAlias = Key[Array, ""]
Stream: TypeAlias = Float[Array, "B T D"]
Mask: TypeAlias = Bool[Array, "B T"] | None
State: TypeAlias = Any
"""What a causal mixer carries from one token to the next: a pytree whose leaves start with the batch axis."""


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
    mask: Mask = None
    """False where `inputs` is padding; None where nothing is."""


@struct.dataclass
class Curve:
    """One measured quantity: an array with one axis for each entry of `axes`, none for a plain number."""

    values: Float[Array, "..."]
    axes: tuple[tuple[str, tuple], ...] = struct.field(pytree_node=False, default=())
    """Pairs (name of the axis, its values), for instance (("gap", (1, 3, 5)),)."""
