"""Attention: content-based look-up of every earlier (or every) token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.attend import attend
from seqlab.linear import Linear
from seqlab.mixers.base import Mixer, NoStepError, divisors, head_width
from seqlab.positions import NoPosition, Position
from seqlab.types import Places, State, Stream


class Attention(Mixer):
    """Multi-head softmax attention: causal as in a transformer decoder, or over the whole sequence as in an encoder.

    For each head softmax(s / temperature) v with s = q k / sqrt(K) (Vaswani et al. 2017, eq. 1), to which the position
    scheme may add. Its state is a cache of the newest keys and values, [B, S, G, K] each, and their number [B].

    Args:
        heads: H, of queries.
        kv_heads: G, of keys and values, each for H / G heads of queries (Ainslie et al. 2023); None: H.
        window: how many positions a query sees on its side, itself included (Beltagy et al. 2020); None: all.
        qk_norm: queries and keys are divided by their root mean square, head by head, and scaled by a learned vector
            (Dehghani et al. 2023, sec. 2), before they are turned to their positions.
        soft_cap: scores q k / sqrt(K) are bent into (-cap, cap) by cap tanh(s / cap) (Gemma Team 2024, sec. 2).

    Raises:
        ValueError: the width is not a multiple of the heads or the heads of kv_heads, the window is below 1, or
            temperature or soft_cap is not above 0.
    """

    attends = True

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        causal: bool = True,
        window: int | None = None,
        position: Position = NoPosition(),
        qk_norm: bool = False,
        temperature: int | float = 1.0,
        soft_cap: int | float | None = None,
        rngs: nnx.Rngs,
    ):
        self.head_width = head_width(width, heads)
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"model.heads={heads} cannot share model.kv_heads={kv_heads}; kv_heads that fit: {divisors(heads)}"
            )
        if window is not None and not (isinstance(window, int) and window >= 1):
            raise ValueError(f"model.window={window} shows a token nothing; use at least 1, or null for no window")
        if not temperature > 0:
            raise ValueError(f"model.temperature={temperature} must be above 0")
        if soft_cap is not None and not (isinstance(soft_cap, int | float) and soft_cap > 0):
            raise ValueError(f"model.soft_cap={soft_cap} must be above 0, or null for no cap")
        self.heads, self.causal, self.window = heads, causal, window
        self.position, self.temperature, self.soft_cap = position, temperature, soft_cap
        self.query, self.out = (Linear(width, width, rngs=rngs) for _ in range(2))
        self.key, self.value = (Linear(width, kv_heads * self.head_width, rngs=rngs) for _ in range(2))
        self.query_norm, self.key_norm = (
            nnx.RMSNorm(self.head_width, dtype=jnp.float32, rngs=rngs) if qk_norm else None for _ in range(2)
        )
        self.position_params = position.score_params(heads, rngs)

    @property
    def sees_order(self) -> bool:
        return self.causal or self.window is not None or self.position.sees_order

    def project(self, x: Stream, positions: Int[Array, "#B T"]) -> tuple[Array, Array, Array]:
        """Queries [B, T, H, K], keys and values [B, T, G, K], the first two turned to their positions."""
        q, k, v = (
            linear(x).reshape(*x.shape[:2], -1, self.head_width) for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = (self.position.rotate(turning, positions).astype(x.dtype) for turning in (q, k))
        return q, k, v

    def look_up(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        query: Places,
        key: Places,
    ) -> Stream:
        # softmax(s / t): the cap and what positions add are parts of the score, so that t divides them as well
        t = self.temperature
        params = None if self.position_params is None else self.position_params[...]
        bias = self.position.bias(self.heads, self.causal, params)
        mixed = attend(
            q,
            k,
            v,
            query,
            key,
            causal=self.causal,
            window=self.window,
            scale=self.head_width**-0.5 / t,
            soft_cap=None if self.soft_cap is None else self.soft_cap / t,
            bias=bias if bias is None or t == 1 else lambda query, key: bias(query, key) / t,
        )
        return self.out(mixed.reshape(*mixed.shape[:2], self.heads * self.head_width))

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        places = places or Places.along(x.shape[1])
        return self.look_up(*self.project(x, places.positions), places, places)

    def init_state(self, batch: int, max_length: int) -> State:
        if not self.causal:
            raise NoStepError("attention to both sides has no token-by-token form; use a causal model")
        slots = max_length if self.window is None else min(self.window, max_length)
        width, dtype = self.key.kernel.shape[-1], self.key.kernel.dtype
        cache = jnp.zeros((batch, slots, width // self.head_width, self.head_width), dtype)
        return {"keys": cache, "values": cache, "length": jnp.zeros(batch, jnp.int32)}

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        """As for any mixer. The cache keeps the newest tokens of a row's last sequence.

        Raises:
            ValueError: a row is one sequence that is longer than the cache, and no window says that it may be.
        """
        length, slots = state["length"], state["keys"].shape[1]
        if x.shape[1] == 0:
            return state, x
        here = places or Places.along(x.shape[1], length)
        segments = here.segments
        if segments is None:
            if slots != self.window and x.shape[1] > slots:
                raise ValueError(
                    f"{x.shape[1]} tokens do not fit the cache of {slots}; "
                    f"use init_state(batch, max_length={x.shape[1]})"
                )
            segments = jnp.ones(x.shape[:2], jnp.int32)
        here = Places(jnp.broadcast_to(here.positions, segments.shape), segments)
        before = held(slots, length, segments[:, :1])
        q, k, v = self.project(x, here.positions)
        both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, here)
        keys, values = (jnp.concatenate(pair, axis=1) for pair in ((state["keys"], k), (state["values"], v)))
        y = self.look_up(q, keys, values, here, both)

        newest = jnp.maximum((segments > 0).sum(axis=1, keepdims=True) - 1, 0)
        last = (segments == jnp.take_along_axis(segments, newest, axis=1)) & (segments > 0)
        length = jnp.where(last.any(axis=1), jnp.where(last, here.positions + 1, 0).max(axis=1), length)
        stays = last & (here.positions >= length[:, None] - slots)
        return self.write(state, k, v, jnp.where(stays, here.positions % slots, slots), length), y

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        position = state["length"][:, None]
        slots = state["keys"].shape[1]
        q, k, v = self.project(x_t[:, None], position)
        # the slot written is free, or holds the one token that has just left the window
        state = self.write(state, k, v, position % slots, state["length"] + 1)
        one = jnp.ones_like(position)
        cached = held(slots, state["length"], one)
        y = self.look_up(q, state["keys"], state["values"], Places(position, one), cached)
        return state, y[:, 0]

    @staticmethod
    def write(state: State, k: Array, v: Array, slot: Int[Array, "B T"], length: Int[Array, " B"]) -> State:
        """A slot beyond the cache is not written."""
        rows = jnp.arange(len(slot))[:, None]
        keys, values = (state[name].at[rows, slot].set(new, mode="drop") for name, new in (("keys", k), ("values", v)))
        return {"keys": keys, "values": values, "length": length}


def held(slots: int, length: Int[Array, " B"], segment: Int[Array, "B 1"]) -> Places:
    """What a ring of slots holds after `length` tokens: slot s the newest position that is s modulo their number."""
    newest = length[:, None] - 1
    positions = newest - (newest - jnp.arange(slots)[None]) % slots
    return Places(positions, jnp.where(positions >= 0, segment, 0))
