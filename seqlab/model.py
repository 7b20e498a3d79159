"""The residual backbone that every architecture shares: embed -> blocks -> norm -> head. Only the mixer differs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.mixers.base import Bidirectional, Mixer, Recurrence
from seqlab.positions import NoPosition, Position
from seqlab.types import Mask, PRNGKey, State, Stream


class MLP(nnx.Module):
    """W_2 gelu(W_1 x): what is computed at each position alone."""

    def __init__(self, width: int, expansion: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, expansion * width, rngs=rngs)
        self.down = nnx.Linear(expansion * width, width, rngs=rngs)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where there is an MLP."""

    def __init__(
        self,
        width: int,
        *,
        mixer: Callable[..., Mixer],
        norm: Callable[..., Callable] = nnx.RMSNorm,
        expansion: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.dropout = dropout
        self.norm_1 = norm(width, rngs=rngs)
        self.mixer = mixer(width, rngs=rngs)
        self.norm_2 = norm(width, rngs=rngs) if expansion else None
        self.mlp = MLP(width, expansion, rngs=rngs) if expansion else None

    def wire(self, x: Array, mix: Callable[[Array], tuple[Any, Array]], key: PRNGKey | None) -> tuple[Any, Array]:
        """The block as its equation, for a sequence and for one token alike; `mix` also returns the mixer's state."""
        key_1, key_2 = (None, None) if key is None else jax.random.split(key)
        state, mixed = mix(self.norm_1(x))
        x = x + drop(mixed, self.dropout, key_1)
        if self.mlp is not None and self.norm_2 is not None:
            x = x + drop(self.mlp(self.norm_2(x)), self.dropout, key_2)
        return state, x

    def __call__(self, x: Stream, mask: Mask = None, key: PRNGKey | None = None) -> Stream:
        return self.wire(x, lambda x: (None, self.mixer(x, mask)), key)[1]

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        return self.wire(x_t, lambda x: self.mixer.step(state, x), None)


class SequenceModel(nnx.Module):
    """Tokens to logits through `depth` equal blocks, whose parameters are stacked and scanned over.

    Args:
        vocab_size: V.
        width: D, the residual stream.
        depth: L, the number of blocks.
        mixer: builds a mixer, as `mixer(width, rngs=rngs)`.
        bidirectional: False; True or "sum": run the mixer both ways and sum; "concat": concatenate and project.

    Raises:
        ValueError: the position scheme acts on attention and the mixer has none, or dropout is no share.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        width: int,
        depth: int,
        mixer: Callable[..., Mixer],
        position: Position = NoPosition(),
        bidirectional: bool | str = False,
        norm: Callable[..., Callable] = nnx.RMSNorm,
        expansion: int = 0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout={dropout} must be at least 0 and below 1")
        self.vocab_size, self.depth, self.position = vocab_size, depth, position
        if bidirectional:
            merge = "sum" if bidirectional is True else bidirectional
            mixer = partial(Bidirectional, mixer=mixer, merge=merge)

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(width, mixer=mixer, norm=norm, expansion=expansion, dropout=dropout, rngs=rngs)

        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (vocab_size, width)))
        self.blocks = stack(rngs)
        self.norm = norm(width, rngs=rngs)
        self.unembed = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)
        if position.needs_attention and not self.blocks.mixer.attends:
            name = type(position).__name__
            raise ValueError(f"position={name.lower()} acts on attention, and this model has none; use position=none")

    @property
    def causal(self) -> bool:
        return self.blocks.mixer.causal

    @property
    def sees_order(self) -> bool:
        """Whether permuting the tokens does more than permute the logits."""
        return self.blocks.mixer.sees_order or self.position.sees_order

    def embed(self, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.embedding[...][tokens]

    def hidden(self, x: Stream, mask: Mask = None, key: PRNGKey | None = None) -> Stream:
        """The residual stream after all blocks, from embedded tokens; `key` turns dropout on."""
        graph, stacked = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, self.depth)

        def apply(x, layer):
            params, key = layer
            return nnx.merge(graph, params)(x, mask, key), None

        x = self.position.embed(x, jnp.arange(x.shape[1]))
        return self.norm(jax.lax.scan(apply, x, (stacked, keys))[0])

    def __call__(
        self, tokens: Int[Array, "B T"], mask: Mask = None, key: PRNGKey | None = None
    ) -> Float[Array, "B T V"]:
        return self.unembed(self.hidden(self.embed(tokens), mask, key))

    def predict(
        self, tokens: Int[Array, "B T"], scored: Int[Array, "B Q"], mask: Mask = None, key: PRNGKey | None = None
    ) -> Float[Array, "B Q V"]:
        """Logits at the scored positions alone: with a large vocabulary the head is most of the work."""
        x = self.hidden(self.embed(tokens), mask, key)
        return self.unembed(jnp.take_along_axis(x, scored[..., None], axis=1))

    def init_state(self, batch: int, max_length: int) -> State:
        """The state before the first token: one stacked mixer state [L, B, ...] and the position of each row."""
        graph, stacked = nnx.split(self.blocks)
        layers = jax.vmap(lambda params: nnx.merge(graph, params).mixer.init_state(batch, max_length))(stacked)
        return {"layers": layers, "position": jnp.zeros(batch, jnp.int32)}

    def step(self, state: State, token: Int[Array, " B"]) -> tuple[State, Float[Array, "B V"]]:
        """One token: the logits that `__call__` gives at its position."""
        graph, stacked = nnx.split(self.blocks)

        def apply(x, layer):
            params, state = layer
            state, x = nnx.merge(graph, params).step(state, x)
            return x, state

        x = self.position.embed(self.embed(token), state["position"])
        x, layers = jax.lax.scan(apply, x, (stacked, state["layers"]))
        return {"layers": layers, "position": state["position"] + 1}, self.unembed(self.norm(x))


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
