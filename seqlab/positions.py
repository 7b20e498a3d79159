"""How a model is told where a token stands. Each scheme is one frozen object with the same two doors.

`embed` adds to the residual stream; `rotate` turns queries and keys. A scheme leaves the door it does not use as it is.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@runtime_checkable
class Position(Protocol):
    sees_order: ClassVar[bool]
    """Whether a permutation of the tokens can be told from their positions."""
    absolute: ClassVar[bool]
    """Whether a common shift of all positions changes the outputs."""
    needs_attention: ClassVar[bool]
    """Whether it acts on queries and keys, and so does nothing in a model that has none."""

    def embed(self, x: Float[Array, "... T D"], positions: Int[Array, " T"]) -> Float[Array, "... T D"]: ...

    def rotate(self, x: Float[Array, "... T H K"], positions: Int[Array, " T"]) -> Float[Array, "... T H K"]: ...


@dataclass(frozen=True)
class NoPosition:
    """Tokens alone. A causal model can still infer order from its mask (Haviv et al. 2022); an encoder cannot."""

    sees_order: ClassVar[bool] = False
    absolute: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False

    def embed(self, x: Float[Array, "... T D"], positions: Int[Array, " T"]) -> Float[Array, "... T D"]:
        return x

    def rotate(self, x: Float[Array, "... T H K"], positions: Int[Array, " T"]) -> Float[Array, "... T H K"]:
        return x


@dataclass(frozen=True)
class Sinusoidal:
    """PE(p)[2i], PE(p)[2i+1] = sin, cos of p / base^(2i/D), added to the embeddings (Vaswani et al. 2017, sec. 3.5)."""

    base: float = 10_000.0
    sees_order: ClassVar[bool] = True
    absolute: ClassVar[bool] = True
    needs_attention: ClassVar[bool] = False

    def embed(self, x: Float[Array, "... T D"], positions: Int[Array, " T"]) -> Float[Array, "... T D"]:
        width = x.shape[-1]
        angles = _angles(positions, (width + 1) // 2, width, self.base)
        waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(len(positions), -1)[:, :width]
        return x + jnp.broadcast_to(waves, x.shape).astype(x.dtype)

    def rotate(self, x: Float[Array, "... T H K"], positions: Int[Array, " T"]) -> Float[Array, "... T H K"]:
        return x


@dataclass(frozen=True)
class RoPE:
    """Turns each pair (x_i, x_{i + K/2}) by the angle p / base^(2i/K), so that scores depend on distance alone
    (Su et al. 2021, eq. 15; half-split pairing).
    """

    base: float = 10_000.0
    sees_order: ClassVar[bool] = True
    absolute: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = True

    def embed(self, x: Float[Array, "... T D"], positions: Int[Array, " T"]) -> Float[Array, "... T D"]:
        return x

    def rotate(self, x: Float[Array, "... T H K"], positions: Int[Array, " T"]) -> Float[Array, "... T H K"]:
        """Raises ValueError where the head width K is odd."""
        width = x.shape[-1]
        if width % 2:
            raise ValueError(
                "position=rope turns pairs of numbers, so the head width model.width / model.heads must be even, "
                f"not {width}"
            )
        angles = _angles(positions, width // 2, width, self.base)[:, None, :]  # T 1 K/2
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = (jnp.broadcast_to(wave, first.shape) for wave in (jnp.cos(angles), jnp.sin(angles)))
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


def _angles(positions: Int[Array, " T"], count: int, width: int, base: float) -> Float[Array, "T count"]:
    frequencies = base ** (-2.0 * jnp.arange(count, dtype=jnp.float32) / width)
    return positions.astype(jnp.float32)[:, None] * frequencies[None, :]
