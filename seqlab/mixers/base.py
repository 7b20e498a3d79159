"""What a mixer is, the common shape of recurrent mixers, and any causal mixer run in both directions.

A mixer moves information between positions; everything else of a model is the same for all architectures.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.linear import Linear
from seqlab.recurrence import Marks, unroll
from seqlab.types import Places, State, Stream


class Recurrence(nnx.Param):
    """A parameter of a recurrence itself (decay, step, recurrent matrix): kept in float32 and never decayed."""


class NoStepError(ValueError):
    """There is no `init_state`, `prefill` and `step`: the mixer sees both directions, or its author wrote none."""


class Mixer(nnx.Module):
    """Built as `Mixer(width, ..., rngs=rngs)`; maps a stream to a stream of the same shape.

    `places` says where the tokens stand, None that each row is one sequence. Padding stands behind the tokens of its
    row (`SequenceModel` brings it there) and changes none of their outputs; sequences in one row do not see each other.
    """

    causal: bool = True
    """Whether position t sees positions s <= t only."""
    sees_order: bool = True
    """Whether a permutation of the inputs does more than permute the outputs."""
    attends: bool = False
    """Whether there are queries and keys for a position scheme to act on."""

    @abstractmethod
    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        """Mixes whole sequences."""

    def init_state(self, batch: int, max_length: int) -> State:
        """The state before the first token, good for `max_length` tokens; what keeps tokens then forgets the oldest."""
        raise NoStepError(f"{type(self).__name__} has no token-by-token form; use a causal model that has one")

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        """Many tokens at once: the state after the last one, and the outputs of them all.

        The first sequence of a row goes on from `state`; its positions do so as well.
        """
        raise NoStepError(f"{type(self).__name__} has no token-by-token form; use a causal model that has one")

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        """One token."""
        state, y = self.prefill(state, x_t[:, None])
        return state, y[:, 0]

    def scale_output(self, factor: float) -> None:
        """Multiplies what a new mixer puts out, by way of its last projection."""
        out = getattr(self, "out", None)
        if not isinstance(out, nnx.Linear):
            raise ValueError(
                f"{type(self).__name__} has no projection `out` to scale; use model.residual_scaling=false"
            )
        out.kernel[...] = out.kernel[...] * factor


class Recurrent(Mixer):
    """A mixer whose whole memory is a state of fixed size, run over a time-major sequence.

    Time-major so that each step of the recurrence reads and writes one contiguous block.
    """

    @abstractmethod
    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        """The state after the last token, and the outputs."""

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        return self.prefill(self.init_state(*x.shape[:2]), x, places)[1]

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        state, y = self.run(state, x.swapaxes(0, 1), Marks.of(None if places is None else places.segments))
        return state, y.swapaxes(0, 1)


class Cell(Recurrent):
    """A state that is driven by each token, advances step by step and is read at each token."""

    @abstractmethod
    def drive(self, x: Float[Array, "T B D"]) -> Any:
        """What the tokens feed into the state."""

    @abstractmethod
    def advance(self, state: State, drive: Any) -> State:
        """h_t from h_{t-1}."""

    @abstractmethod
    def read(self, states: State, x: Float[Array, "T B D"]) -> Float[Array, "T B D"]:
        """The outputs from the states and the tokens."""

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        # of a step only its products are kept for the backward pass: less memory to move, and no slower
        advance = jax.checkpoint(self.advance, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
        state, states = unroll(advance, state, self.drive(x), marks)
        return state, self.read(states, x)


def head_width(size: int, heads: int, name: str = "model.width") -> int:
    """How wide each head is.

    Raises:
        ValueError: the heads cannot share the size.
    """
    if heads < 1 or size % heads:
        raise ValueError(f"{name}={size} cannot be split into model.heads={heads}; heads that fit: {divisors(size)}")
    return size // heads


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def negative(eigenvalue_range: Sequence[int | float]) -> bool:
    """Whether eigenvalues span (-1, 1), as parity and other states to track need (Grazzi et al. 2025).

    Raises:
        ValueError: the range is neither (0, 1) nor (-1, 1).
    """
    if tuple(eigenvalue_range) not in ((0, 1), (-1, 1)):
        raise ValueError(f"model.eigenvalue_range={list(eigenvalue_range)} is unknown; use [0,1] or [-1,1]")
    return eigenvalue_range[0] == -1


def turned(length: int, places: Places | None) -> Int[Array, "#B T"]:
    """The order that reverses the tokens of each row and leaves its padding behind them."""
    index = jnp.arange(length)[None]
    if places is None or places.segments is None:
        return index[:, ::-1]
    tokens = (places.segments > 0).sum(axis=1, keepdims=True)
    return jnp.where(index < tokens, tokens - 1 - index, index)


class Bidirectional(Mixer):
    """A causal mixer over the sequence and another over its reverse, summed, or concatenated and projected to width
    (Schuster & Paliwal 1997).

    Raises:
        ValueError: the mixer sees both directions already, or `merge` is unknown.
    """

    causal = False

    def __init__(self, width: int, *, mixer: Callable[..., Mixer], merge: str = "sum", rngs: nnx.Rngs):
        if merge not in ("sum", "concat"):
            raise ValueError(f"model.bidirectional={merge} is unknown; use false, true, sum or concat")
        self.forward = mixer(width, rngs=rngs)
        self.backward = mixer(width, rngs=rngs)
        if not self.forward.causal:
            raise ValueError("this model sees both directions already; leave model.bidirectional=false")
        self.attends = self.forward.attends
        self.join = Linear(2 * width, width, rngs=rngs) if merge == "concat" else None

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        forward = self.forward(x, places)
        order = turned(x.shape[1], places)
        there = None
        if places is not None and places.segments is not None:
            there = Places.of(jnp.take_along_axis(places.segments, order, axis=1))
        backward = self.backward(jnp.take_along_axis(x, order[..., None], axis=1), there)
        backward = jnp.take_along_axis(backward, order[..., None], axis=1)
        if self.join is None:
            return forward + backward
        return self.join(jnp.concatenate([forward, backward], axis=-1))

    def scale_output(self, factor: float) -> None:
        for branch in (self.forward, self.backward):
            branch.scale_output(factor)
