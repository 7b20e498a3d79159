"""The residual backbone that every architecture shares: embed -> blocks -> norm -> head. Only the mixer differs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.linear import Linear
from seqlab.mixers.base import Bidirectional, Mixer, Recurrence
from seqlab.mixers.convolution import Convolved
from seqlab.positions import NoPosition, Position
from seqlab.types import Places, PRNGKey, Segments, State, Stream

BuildMixer = Callable[..., Mixer]
Pin = Callable[[Array], Array]
"""Says within a compiled function on which devices a stream's examples lie; by default it says nothing."""


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where there is an MLP.

    `output_scale` multiplies the last projection of both branches before training.
    """

    def __init__(
        self,
        width: int,
        *,
        mixer: BuildMixer,
        norm: Callable[..., Callable] = nnx.RMSNorm,
        mlp: Callable[..., Callable] | None = None,
        dropout: float = 0.0,
        output_scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.dropout = dropout
        self.norm_1 = norm(width, rngs=rngs)
        self.mixer = mixer(width, rngs=rngs)
        self.norm_2 = norm(width, rngs=rngs) if mlp else None
        self.mlp = mlp(width, rngs=rngs) if mlp else None
        if output_scale != 1.0:
            self.mixer.scale_output(output_scale)
            if self.mlp is not None:
                self.mlp.out.kernel[...] = self.mlp.out.kernel[...] * output_scale

    def wire(self, x: Array, mix: Callable[[Array], tuple[Any, Array]], key: PRNGKey | None) -> tuple[Any, Array]:
        """The block as its equation, for sequences and single tokens alike; `mix` also returns the mixer's state."""
        key_1, key_2 = (None, None) if key is None else jax.random.split(key)
        state, mixed = mix(self.norm_1(x))
        x = x + drop(mixed, self.dropout, key_1)
        if self.mlp is not None and self.norm_2 is not None:
            x = x + drop(self.mlp(self.norm_2(x)), self.dropout, key_2)
        return state, x

    def __call__(self, x: Stream, places: Places | None = None, key: PRNGKey | None = None) -> Stream:
        return self.wire(x, lambda x: (None, self.mixer(x, places)), key)[1]

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        return self.wire(x, lambda x: self.mixer.prefill(state, x, places), None)

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        return self.wire(x_t, lambda x: self.mixer.step(state, x), None)


class SequenceModel(nnx.Module):
    """Tokens to logits through `depth` blocks. A pattern of mixers repeats along the depth; what repeats has its
    parameters stacked and is scanned over.

    Args:
        vocab_size: V.
        width: D, the residual stream.
        depth: L, the number of blocks.
        mixer: builds a mixer, as `mixer(width, rngs=rngs)`; or several, one for each block of the pattern.
        bidirectional: False; True or "sum": run the mixers both ways and sum; "concat": concatenate and project.
        mlp: builds what follows the mixer in each block, as `mlp(width, rngs=rngs)`.
        convolution: how many tokens a short causal convolution before each mixer spans; 0: none.
        tied: the head is the embedding, transposed and divided by sqrt(D).
        residual_scaling: the last projection of each of the n residual branches starts 1/sqrt(n) as large (GPT-2;
            Radford et al. 2019, sec. 2.3).
        rematerialize: gradients compute each block a second time instead of keeping what happened in it (Chen et al.
            2016).

    Raises:
        ValueError: the pattern does not divide the depth, the position scheme acts on attention and no mixer has any,
            or dropout is no share.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        width: int,
        depth: int,
        mixer: BuildMixer | Sequence[BuildMixer],
        position: Position = NoPosition(),
        bidirectional: bool | str = False,
        norm: Callable[..., Callable] = nnx.RMSNorm,
        mlp: Callable[..., Callable] | None = None,
        dropout: float = 0.0,
        convolution: int = 0,
        tied: bool = False,
        residual_scaling: bool = False,
        rematerialize: bool = False,
        rngs: nnx.Rngs,
    ):
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} must be at least 0 and below 1")
        pattern = [mixer] if callable(mixer) else list(mixer)
        if not pattern or depth % len(pattern):
            raise ValueError(
                f"model.depth={depth} is no multiple of the {len(pattern)} mixers of the pattern; "
                f"use model.depth={max(depth // max(len(pattern), 1), 1) * len(pattern)}"
            )
        self.vocab_size, self.position, self.rematerialize = vocab_size, position, rematerialize
        self.repeats = depth // len(pattern)
        if convolution:
            pattern = [partial(Convolved, mixer=mixer, size=convolution) for mixer in pattern]
        if bidirectional:
            merge = "sum" if bidirectional is True else bidirectional
            pattern = [partial(Bidirectional, mixer=mixer, merge=merge) for mixer in pattern]
        scale = (depth * (2 if mlp else 1)) ** -0.5 if residual_scaling else 1.0

        @nnx.split_rngs(splits=self.repeats)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.List[Block]:
            shared = {"norm": norm, "mlp": mlp, "dropout": dropout, "output_scale": scale, "rngs": rngs}
            return nnx.List([Block(width, mixer=mixer, **shared) for mixer in pattern])

        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, width)))
        self.blocks = stack(rngs)
        self.norm = norm(width, rngs=rngs)
        self.head = None if tied else Linear(width, vocab_size, use_bias=False, rngs=rngs)
        if position.needs_attention and not any(mixer.attends for mixer in self.mixers):
            raise ValueError(f"position={position.name} acts on attention, and this model has none; use position=none")
        self.position_params = position.stream_params(width, rngs)

    @property
    def mixers(self) -> list[Mixer]:
        """Those of one pattern, the parameters of each stacked over its repeats."""
        return [block.mixer for block in self.blocks]

    @property
    def causal(self) -> bool:
        return all(mixer.causal for mixer in self.mixers)

    @property
    def sees_order(self) -> bool:
        """Whether permuting the tokens does more than permute the logits."""
        return self.position.sees_order or any(mixer.sees_order for mixer in self.mixers)

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.embedding[...][tokens]

    def place(self, x: Stream, places: Places) -> Stream:
        """The tokens and what the position scheme adds to them.

        Raises:
            ValueError: a row is one sequence, and longer than there are positions.
        """
        if places.segments is None:
            self.position.admit(x.shape[1])
        params = None if self.position_params is None else self.position_params[...]
        return self.position.embed(x, places.positions, params)

    def unembed(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        if self.head is not None:
            return self.head(x)
        return x @ self.embedding[...].T / x.shape[-1] ** 0.5

    def hidden(
        self, x: Stream, places: Places | None = None, key: PRNGKey | None = None, pin: Pin = lambda x: x
    ) -> Stream:
        """The residual stream after all blocks, from embedded tokens; `key` turns dropout on."""
        graph, stacked = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, (self.repeats, len(self.blocks)))
        places, restore = Places.along(x.shape[1]) if places is None else places, None
        if places.segments is not None:
            x, places, restore = padding_behind(x, places)

        def apply(x, layer):
            params, keys = layer
            for i, block in enumerate(nnx.merge(graph, params)):
                call = jax.checkpoint(block, prevent_cse=False) if self.rematerialize else block
                x = pin(call(x, places, None if keys is None else keys[i]))
            return x, None

        x = pin(self.place(x, places))
        x = self.norm(jax.lax.scan(apply, x, (stacked, keys))[0])
        return x if restore is None else jnp.take_along_axis(x, restore, axis=1)

    def __call__(
        self, tokens: Int[Array, "B T"], segments: Segments = None, key: PRNGKey | None = None
    ) -> Float[Array, "B T V"]:
        return self.unembed(self.hidden(self.embed(tokens), packed(segments), key))

    def predict(
        self,
        tokens: Int[Array, "B T"],
        scored: Int[Array, "B Q"],
        segments: Segments = None,
        key: PRNGKey | None = None,
        pin: Pin = lambda x: x,
    ) -> Float[Array, "B Q V"]:
        """Logits at the scored positions alone: with a large vocabulary the head is most of the work."""
        x = self.hidden(self.embed(tokens), packed(segments), key, pin)
        return self.unembed(jnp.take_along_axis(x, scored[..., None], axis=1))

    def init_state(self, batch: int, max_length: int) -> State:
        """The state before the first token: of each mixer of the pattern [repeats, B, ...], and each row's position."""
        self.position.admit(max_length)
        graph, stacked = nnx.split(self.blocks)

        def layer(params: nnx.State) -> list[State]:
            return [block.mixer.init_state(batch, max_length) for block in nnx.merge(graph, params)]

        return {"layers": jax.vmap(layer)(stacked), "position": jnp.zeros(batch, jnp.int32)}

    def prefill(self, state: State, tokens: Int[Array, "B T"], segments: Segments = None) -> tuple[State, Stream]:
        """Many tokens at once: the state after each row's last one, and the residual stream as `hidden` gives it.

        The first sequence of a row goes on from `state`, which afterwards belongs to the row's last sequence.
        """
        first, x, restore = state["position"], self.embed(tokens), None
        places = Places.along(tokens.shape[1], first)
        position = first + tokens.shape[1]
        if segments is not None:
            x, places, restore = padding_behind(x, Places.of(segments, first))
            tokens_in_row = (segments > 0).sum(axis=1)
            newest = jnp.maximum(tokens_in_row - 1, 0)[:, None]
            position = jnp.take_along_axis(places.positions, newest, axis=1)[:, 0] + 1 if tokens.size else first
            position = jnp.where(tokens_in_row > 0, position, first)
        x = self.place(x, places)
        layers, x = self._advance(state, x, lambda block, state, x: block.prefill(state, x, places))
        x = x if restore is None else jnp.take_along_axis(x, restore, axis=1)
        return {"layers": layers, "position": position}, x

    def step(self, state: State, token: Int[Array, " B"]) -> tuple[State, Float[Array, "B V"]]:
        """One token: the logits that `__call__` gives at its position."""
        x = self.place(self.embed(token)[:, None], Places(state["position"][:, None]))[:, 0]
        layers, x = self._advance(state, x, lambda block, state, x: block.step(state, x))
        return {"layers": layers, "position": state["position"] + 1}, self.unembed(x)

    def _advance(
        self, state: State, x: Array, advance: Callable[[Block, State, Array], tuple[State, Array]]
    ) -> tuple[list[State], Array]:
        """All blocks, each with its state."""
        graph, stacked = nnx.split(self.blocks)

        def apply(x, layer):
            params, before = layer
            after = []
            for block, state in zip(nnx.merge(graph, params), before, strict=True):
                state, x = advance(block, state, x)
                after.append(state)
            return x, after

        x, layers = jax.lax.scan(apply, x, (stacked, state["layers"]))
        return layers, self.norm(x)


def packed(segments: Segments) -> Places | None:
    return None if segments is None else Places.of(segments)


def padding_behind(x: Stream, places: Places) -> tuple[Stream, Places, Int[Array, "B T 1"]]:
    """The tokens of each row moved together, its padding behind them; and the order that undoes it."""
    assert places.segments is not None
    order = jnp.argsort(places.segments == 0, axis=1, stable=True)
    moved = jax.tree.map(lambda part: jnp.take_along_axis(part, order, axis=1), places)
    return jnp.take_along_axis(x, order[..., None], axis=1), moved, jnp.argsort(order, axis=1)[..., None]


def drop(x: Array, rate: float, key: PRNGKey | None) -> Array:
    """Dropout (Srivastava et al. 2014) where a key is given."""
    if key is None or not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0.0).astype(x.dtype)


def compute_in(dtype: jnp.dtype, params: nnx.State) -> nnx.State:
    """The parameters as the forward pass sees them: in `dtype`, but for those of a recurrence."""

    def cast(param: nnx.Variable) -> nnx.Variable:
        return param if isinstance(param, Recurrence) else param.replace(param[...].astype(dtype))

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
