"""Convolutions along time: the short causal one that many architectures put before their memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.mixers.base import Mixer, Recurrent
from seqlab.recurrence import Marks
from seqlab.types import Places, State, Stream


class ShortConvolution(Recurrent):
    """y_t = bias + sum_i kernel[size - 1 - i] * x_{t - i}, for each channel alone. Its state is its last inputs.

    Raises:
        ValueError: `size` is below 1.
    """

    def __init__(self, width: int, *, size: int = 4, use_bias: bool = True, rngs: nnx.Rngs):
        if size < 1:
            raise ValueError(f"a convolution over {size} tokens is none; use 1 or more")
        bound = size**-0.5  # as for a linear layer of `size` inputs, whose output has a third of their variance
        shape = (size, width)
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))
        self.bias = nnx.Param(jnp.zeros(width)) if use_bias else None

    def init_state(self, batch: int, max_length: int) -> State:
        size, width = self.kernel.shape
        return jnp.zeros((batch, size - 1, width), self.kernel.dtype)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        length, past = len(x), len(self.kernel) - 1
        inputs = jnp.concatenate([state.swapaxes(0, 1).astype(x.dtype), x])
        since = None if marks is None else age(marks, past)
        y = jnp.zeros_like(x) if self.bias is None else jnp.broadcast_to(self.bias[...], x.shape)
        for lag in range(past + 1):
            earlier = inputs[past - lag : past - lag + length]
            if since is not None:
                earlier = jnp.where((since >= lag)[..., None], earlier, 0.0)
            y = y + jnp.broadcast_to(self.kernel[...][past - lag], x.shape) * earlier
        return last_inputs(inputs, past, marks, since).astype(state.dtype), y


def age(marks: Marks, unknown: int) -> Int[Array, "T B"]:
    """How many tokens of its sequence stand before each token; `unknown` more in the first sequence of a row."""
    index = jnp.broadcast_to(jnp.arange(len(marks.start))[:, None], marks.start.shape)
    return index - jax.lax.cummax(jnp.where(marks.start, index, -unknown), axis=0)


def last_inputs(
    inputs: Float[Array, "S B D"], count: int, marks: Marks | None, since: Int[Array, "T B"] | None
) -> Float[Array, "B count D"]:
    """The newest `count` inputs of each row, zero where they belong to a sequence before its last."""
    if marks is None or since is None or not len(since):
        return inputs[len(inputs) - count :].swapaxes(0, 1)
    tokens = marks.real.sum(axis=0)  # of each row; padding stands behind them
    newest = jnp.take_along_axis(inputs, (tokens[None] + jnp.arange(count)[:, None])[..., None], axis=0)
    before = jnp.take_along_axis(since, jnp.maximum(tokens - 1, 0)[None], axis=0)  # the newest token's age
    return jnp.where((before + 1 >= jnp.arange(count, 0, -1)[:, None])[..., None], newest, 0.0).swapaxes(0, 1)


class Convolved(Mixer):
    """Any mixer over the stream after a short causal convolution (as in H3 and Mamba; Fu et al. 2023)."""

    def __init__(self, width: int, *, mixer: Callable[..., Mixer], size: int, rngs: nnx.Rngs):
        self.convolution = ShortConvolution(width, size=size, rngs=rngs)
        self.mixer = mixer(width, rngs=rngs)
        self.causal, self.attends = self.mixer.causal, self.mixer.attends

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        return self.mixer(self.convolution(x, places), places)

    def init_state(self, batch: int, max_length: int) -> State:
        return {
            "inputs": self.convolution.init_state(batch, max_length),
            "mixer": self.mixer.init_state(batch, max_length),
        }

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        inputs, x = self.convolution.prefill(state["inputs"], x, places)
        inner, y = self.mixer.prefill(state["mixer"], x, places)
        return {"inputs": inputs, "mixer": inner}, y

    def step(self, state: State, x_t: Float[Array, "B D"]) -> tuple[State, Float[Array, "B D"]]:
        inputs, x_t = self.convolution.step(state["inputs"], x_t)
        inner, y_t = self.mixer.step(state["mixer"], x_t)
        return {"inputs": inputs, "mixer": inner}, y_t

    def scale_output(self, factor: float) -> None:
        self.mixer.scale_output(factor)
