"""Hyena: gated long convolutions whose filters a small network writes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from seqlab.linear import Linear
from seqlab.long_convolution import long_convolution
from seqlab.mixers.base import Recurrence, Recurrent
from seqlab.mixers.convolution import ShortConvolution, age, last_inputs
from seqlab.recurrence import Marks
from seqlab.types import Places, State, Stream


class Filter(nnx.Module):
    """The filters h_1 .. h_order [L, D] as a function of the lag alone (Poli et al. 2023, sec. 3.3):

        h(l) = w(l) * MLP(l / horizon, cos and sin of 2 pi f l / horizon for `bands` frequencies f)

    with three layers of sines, sin(f * z) with f = 10 at the start, and the window w_d(l) = g_d exp(-r_d l / horizon).
    Its rates r_d lie between those at which 1% is left after 1.5 horizons and after .3. g_d makes the squares of the
    window sum to 1, so that white noise keeps its variance whatever the horizon. Time is measured in horizons, and not
    in lengths of the sequence at hand, so that a prefix has the filters of the whole.

    Evaluated in float32 and at full precision, for each sine makes a rounding 10 times larger.
    """

    def __init__(
        self,
        width: int,
        *,
        order: int,
        hidden: int,
        bands: int = 8,
        horizon: int | float,
        rngs: nnx.Rngs,
    ):
        self.order, self.bands, self.horizon = order, bands, horizon

        def linear(inner: int, outer: int, use_bias: bool = True) -> nnx.Linear:
            layer = nnx.Linear(inner, outer, use_bias=use_bias, dtype=jnp.float32, precision="highest", rngs=rngs)
            layer.kernel = Recurrence(layer.kernel[...])
            if layer.bias is not None:
                layer.bias = Recurrence(layer.bias[...])
            return layer

        self.hidden = nnx.List([linear(hidden if i else 1 + 2 * bands, hidden) for i in range(3)])
        self.out = linear(hidden, order * width, use_bias=False)
        self.frequency = nnx.Param(jnp.full(hidden, 10.0))

    def __call__(self, lags: Int[Array, " L"]) -> Float[Array, "order L D"]:
        time = (lags.astype(jnp.float32) / self.horizon)[:, None]
        angle = time * jnp.linspace(1e-4, max(self.bands - 1, 1e-4), self.bands, dtype=jnp.float32)[None] * (2 * np.pi)
        z = jnp.concatenate([time, jnp.cos(angle), jnp.sin(angle)], axis=1)
        for layer in self.hidden:
            z = layer(z)
            z = jnp.sin(jnp.broadcast_to(self.frequency[...].astype(jnp.float32), z.shape) * z)
        h = self.out(z).reshape(len(lags), self.order, -1).swapaxes(0, 1)
        rate = jnp.linspace(-np.log(0.01) / 1.5, -np.log(0.01) / 0.3, h.shape[-1], dtype=jnp.float32)[None]
        window = jnp.sqrt(-jnp.expm1(-2.0 * rate / self.horizon)) * jnp.exp(-rate * time)
        return h * jnp.broadcast_to(window[None], h.shape)


class Hyena(Recurrent):
    """Products of projections and long convolutions (Poli et al. 2023, def. 3.1), in float32:

        z = v,  z = x_n * (h_n conv z + b_n * z) for n = 1 .. order,  y = W_o z

    where v and x_n are projections of the tokens after a short convolution over 3 of them, and h_n are the filters.

    The convolutions go by FFT from the halves of blocks to the other halves (`causal_convolution`): no output depends
    on a later token or on another sequence, not even in its rounding, which is some 2^-24 log2 T of what came before.

    The state holds the last `max_length` inputs of each convolution, [B, max_length, D] each, and those of the short
    one. A step takes time in proportion to max_length and not to T^2, for the filter network is run at that many lags;
    once they are full the oldest input leaves.

    Raises:
        ValueError: `order`, `filter_width` or `horizon` is below 1, or more tokens than the cache holds are prefilled.
    """

    def __init__(
        self,
        width: int,
        *,
        order: int = 2,
        filter_width: int = 64,
        horizon: int | float = 1024,
        rngs: nnx.Rngs,
    ):
        for option, value in (("order", order), ("filter_width", filter_width), ("horizon", horizon)):
            if value < 1:
                raise ValueError(f"a Hyena needs {option} of 1 or more, not {option}={value}")
        self.order = order
        self.inputs = Linear(width, (order + 1) * width, rngs=rngs)
        self.short = ShortConvolution((order + 1) * width, size=3, rngs=rngs)
        self.filter = Filter(width, order=order, hidden=filter_width, horizon=horizon, rngs=rngs)
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (order, width)))
        self.out = Linear(width, width, rngs=rngs)

    def init_state(self, batch: int, max_length: int) -> State:
        cache = jnp.zeros((batch, max_length, self.out.kernel.shape[-1]), jnp.float32)
        return {"short": self.short.init_state(batch, max_length), "long": [cache] * self.order}

    def __call__(self, x: Stream, places: Places | None = None) -> Stream:
        return super().prefill(self.init_state(len(x), 0), x, places)[1]

    def prefill(self, state: State, x: Stream, places: Places | None = None) -> tuple[State, Stream]:
        size = state["long"][0].shape[1]
        if x.shape[1] > size:
            raise ValueError(
                f"{x.shape[1]} tokens do not fit the cache of {size}; use init_state(batch, max_length={x.shape[1]})"
            )
        return super().prefill(state, x, places)

    def run(self, state: State, x: Float[Array, "T B D"], marks: Marks | None) -> tuple[State, Float[Array, "T B D"]]:
        past, length = state["long"][0].shape[1], len(x)
        short, projected = self.short.run(state["short"], self.inputs(x), marks)
        z, *gates = jnp.split(projected.astype(jnp.float32), self.order + 1, axis=-1)
        since = None if marks is None else age(marks, past)
        filters = self.filter(jnp.arange(past + length))
        long = []
        for h, bias, gate, cache in zip(filters, self.bias[...], gates, state["long"], strict=True):
            h = h.at[:1].add(bias.astype(jnp.float32)[None])
            inputs = jnp.concatenate([cache.swapaxes(0, 1), z])
            long.append(last_inputs(inputs, past, marks, since))
            z = gate * long_convolution(h, inputs, since, length)
        return {"short": short, "long": long}, self.out(z.astype(x.dtype))
