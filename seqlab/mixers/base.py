"""What a mixer is, the common shape of recurrent mixers, and any causal mixer run in both directions.

A mixer moves information between positions; everything else of a model is the same for all architectures.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from seqlab.recurrence import unroll
from seqlab.types import Mask, State, Stream


class Recurrence(nnx.Param):
    """A parameter of a recurrence itself (decay, step, recurrent matrix): kept in float32 and never decayed."""


class Mixer(nnx.Module):
    """Built as `Mixer(width, ..., rngs=rngs)`; maps a stream to a stream of the same shape."""

    causal: bool = True
    """Whether position t sees positions s <= t only."""
    sees_order: bool = True
    """Whether a permutation of the inputs does more than permute the outputs."""
    attends: bool = False
    """Whether there are queries and keys for a position scheme to turn."""

    @abstractmethod
    def __call__(self, x: Stream, mask: Mask = None) -> Stream:
        """Mixes a whole sequence. Positions where `mask` is False are padding: they change no other position."""

    def init_state(self, batch: int, max_length: int) -> State:
        """The state before the first token, for `step`."""
        raise NotImplementedError(f"{type(self).__name__} has no token-by-token form")

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        """One token: what `__call__` gives at the next position."""
        raise NotImplementedError(f"{type(self).__name__} has no token-by-token form")


class Recurrent(Mixer):
    """A state that is driven by each token and read at each token: written once for a sequence and for one token."""

    @abstractmethod
    def drive(self, x: Float[Array, "... D"]) -> Any:
        """What the tokens feed into the state."""

    @abstractmethod
    def advance(self, state: State, drive: Any) -> State:
        """h_t from h_{t-1}."""

    @abstractmethod
    def read(self, state: State, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The output from the state and the token."""

    def states(self, drive: Any, start: State, mask: Bool[Array, "T B"] | None) -> State:
        return unroll(self.advance, start, drive, mask)

    def __call__(self, x: Stream, mask: Mask = None) -> Stream:
        x = x.swapaxes(0, 1)  # time-major, so that each step of the recurrence reads one contiguous block
        start = self.init_state(x.shape[1], x.shape[0])
        states = self.states(self.drive(x), start, None if mask is None else mask.T)
        return self.read(states, x).swapaxes(0, 1)

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        state = self.advance(state, self.drive(x_t))
        return state, self.read(state, x_t)


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
        self.join = nnx.Linear(2 * width, width, rngs=rngs) if merge == "concat" else None

    def __call__(self, x: Stream, mask: Mask = None) -> Stream:
        flipped = None if mask is None else jnp.flip(mask, axis=1)
        forward = self.forward(x, mask)
        backward = jnp.flip(self.backward(jnp.flip(x, axis=1), flipped), axis=1)
        if self.join is None:
            return forward + backward
        return self.join(jnp.concatenate([forward, backward], axis=-1))
