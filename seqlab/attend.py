"""Softmax attention, block by block over the queries: keys that no query of a block can see are left out, and what a
long sequence would have to keep for its backward pass is computed again there (Rabe & Staats 2021, sec. 2 and 5).

It needs no gradient of its own. With the division by the softmax's sum after the values are mixed,

    o_t = sum_s e_st v_s / sum_s e_st,    e_st = exp(score_st - max_s score_st),

the derivative by score_st is e_st (do_t v_s - do_t o_t) / sum_s e_st: the same product and one pass over the scores
that a hand-written backward pass has (Dao et al. 2022, app. B.2). So jit, grad, jvp, vmap, scan and checkpoint work.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from seqlab.types import Places

Bias: TypeAlias = Callable[[Int[Array, "#B T"], Int[Array, "#B S"]], Float[Array, "#B H T S"]]
"""Added to a score, from the positions of query and key. Parameters that it closes over get their gradients."""

BLOCK = 64
"""Queries whose scores exist at a time. More need more memory, which a processor's cache does not hold."""

RUNS = 4
"""A causal sequence is a loop over blocks for each quarter, whose keys end where the quarter does: (1 + 1/4) / 2 of all
scores are computed, where the least is half. Twice as many loops take twice as long to compile and save 6%."""


@struct.dataclass
class _Queries:
    q: Float[Array, "B G R T K"]
    places: Places


@struct.dataclass
class _Keys:
    k: Float[Array, "B G S K"]
    v: Float[Array, "B G S K"]
    places: Places


_Sums: TypeAlias = tuple[Float[Array, "B G K R T"], Float[Array, "B G R T"]]
"""Over keys s, of e_st v_s and of e_st."""


@dataclass(frozen=True)
class _Rule:
    causal: bool
    scale: float
    window: int | None
    bias: Bias | None
    soft_cap: float | None

    def sees(self, query: Places, key: Places) -> Bool[Array, "#B S T"] | None:
        """From places that have a last axis of 1."""
        ahead = key.positions - query.positions.swapaxes(-1, -2)
        conditions = [ahead <= 0] if self.causal else []
        if self.window is not None:
            conditions.append(ahead > -self.window)
            if not self.causal:
                conditions.append(ahead < self.window)
        if query.segments is not None and key.segments is not None:
            conditions.append((key.segments == query.segments.swapaxes(-1, -2)) & (key.segments > 0))
        return reduce(jnp.logical_and, conditions) if conditions else None

    def mix(self, queries: _Queries, keys: _Keys) -> _Sums:
        # Scores stand as [S, R T]. XLA's CPU product of a left factor that is summed over its first axis is two to six
        # times slower than any other; of the seven products here and in the gradient, only that for the queries is one.
        q, k, v, query, key = queries.q, keys.k, keys.v, queries.places, keys.places
        B, G, R, T, K = q.shape
        S = k.shape[2]
        rows = q.reshape(B, G, R * T, K)  # as one axis, for with two the products are slower again
        scores = self.scale * jnp.einsum("BGSK,BGTK->BGST", k, rows, preferred_element_type=jnp.float32)
        scores = scores.reshape(B, G, S, R, T)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            bias = self.bias(query.positions[..., 0], key.positions[..., 0]).astype(jnp.float32)
            scores += bias.reshape(bias.shape[0], G, R, T, S).transpose(0, 1, 4, 2, 3)
        sees = self.sees(query, key)
        if sees is not None:
            scores = jnp.where(sees[:, None, :, None, :], scores, -jnp.inf)
        # finite also where nothing is seen; it cancels, and so has no gradient
        top = jnp.max(scores, axis=2, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        e = jnp.exp(scores - jax.lax.stop_gradient(top))
        weights = e.astype(v.dtype).reshape(B, G, S, R * T)
        mixed = jnp.einsum("BGSK,BGST->BGKT", v, weights, preferred_element_type=jnp.float32)
        return mixed.reshape(B, G, K, R, T), e.sum(axis=2)


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    query: Places,
    key: Places,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    bias: Bias | None = None,
    soft_cap: float | None = None,
    block: int = BLOCK,
) -> Float[Array, "B T H K"]:
    """softmax(score) v over the keys that a query sees (Vaswani et al. 2017, eq. 1), in v's dtype; head h looks into
    the keys of head h // (H / G) (Ainslie et al. 2023). A query that sees nothing gets 0, and its gradients are 0.

    score = cap(scale q k) + bias, where cap(x) = soft_cap tanh(x / soft_cap); scores and softmax are float32. A query
    sees keys of its own segment, if `causal` at its own position or before, and if `window` less than that apart.

    Keys are S - T cache slots in any order, then the T new tokens in the order of the queries. What is left out is
    decided by that order before positions are known: of new tokens, i sees no j > i if `causal`, and none with
    |i - j| >= `window`. So within a segment positions must grow by one or more a slot; padding inside it counts.
    Without `causal` keys are the new tokens only if S = T, and else all may be seen.

    Where there is more than one block a run, gradients compute the weights again and memory is linear in T.

    Raises:
        ValueError: H is no multiple of G, the window is empty, or causal queries have no keys of their own (S < T).
    """
    B, T, H, K = q.shape
    S, G = k.shape[1:3]
    if H % G:
        raise ValueError(f"{H} heads of queries cannot share {G} heads of keys; the first must be a multiple")
    if window is not None and window < 1:
        raise ValueError(f"window={window} leaves a query nothing to see; use 1 or more")
    if causal and S < T:
        raise ValueError(f"causal attention needs a key for each of the {T} queries, not {S}")
    rule = _Rule(causal, scale, window, bias, soft_cap)
    if (query.segments is None) != (key.segments is None):
        query, key = _in_segments(query), _in_segments(key)
    query, key = jax.tree.map(lambda x: x[..., None], (query, key))  # as in q and k, slots are the last axis but one
    queries = _Queries(q.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4), query)
    keys = _Keys(k.swapaxes(1, 2), v.swapaxes(1, 2), key)
    if block >= T:
        runs = [rule.mix(queries, keys)]
    elif window is not None and window + block <= T // 2 and (causal or S == T):
        runs = [_in_window(rule, queries, keys, -(-(window - 1) // block), block)]
    else:
        runs = _in_runs(rule, queries, keys, block)
    mixed, total = (jnp.concatenate(parts, axis=-1) for parts in zip(*runs, strict=True))
    y = mixed / jnp.where(total > 0, total, 1.0)[:, :, None]
    return y.astype(v.dtype).transpose(0, 4, 1, 3, 2).reshape(B, T, H, K)


def _in_runs(rule: _Rule, queries: _Queries, keys: _Keys, block: int) -> list[_Sums]:
    """One loop over blocks a run, each over the keys that some query of the run may see."""
    T, S, window = queries.q.shape[-2], keys.k.shape[-2], rule.window
    if not rule.causal and (window is None or S != T):
        return [_loop(rule, queries, keys, None, block)]
    cached, length = S - T, -(-T // (RUNS * block)) * block
    runs = []
    for start in range(0, T, length):
        stop = min(T, start + length)
        first, last = 0, stop
        if window is not None:
            first = max(0, start - window + 1)
            last = stop if rule.causal else min(T, stop + window - 1)
        seen = _cut(keys, 0, cached + last)
        if first:
            seen = _join(_cut(keys, 0, cached), _cut(keys, cached + first, cached + last))
        runs.append(_loop(rule, _cut(queries, start, stop), seen, None, block))
    return runs


def _in_window(rule: _Rule, queries: _Queries, keys: _Keys, reach: int, block: int) -> _Sums:
    """One loop over blocks, each over the cache, its own keys, and `reach` blocks before (not causal: and after)."""
    T, S = queries.q.shape[-2], keys.k.shape[-2]
    keys = replace(keys, places=_in_segments(keys.places))
    queries = replace(queries, places=_in_segments(queries.places))
    ahead = 0 if rule.causal else reach
    beyond = reach * block, ahead * block - T % -block  # slots of segment 0, which nothing sees

    def near(x: Array) -> Array:
        blocks = _blocks(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [beyond, (0, 0)]), block)
        count = len(blocks) - reach - ahead
        return jnp.concatenate([blocks[i : i + count] for i in range(reach + 1 + ahead)], axis=-2)

    return _loop(rule, queries, _cut(keys, 0, S - T), jax.tree.map(near, _cut(keys, S - T, S)), block)


def _loop(rule: _Rule, queries: _Queries, shared: _Keys, near: _Keys | None, block: int) -> _Sums:
    """`mix` for each block of queries, over `shared` keys and the block's own entry of `near`."""
    T = queries.q.shape[-2]
    if block >= T:
        return rule.mix(queries, shared)
    # its last query again, for what is no place could have no finite bias
    filled = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -T % block), (0, 0)], mode="edge"), queries
    )
    # not around the division, which needs `mixed`: that would be a third product to compute again
    mix = jax.checkpoint(rule.mix, prevent_cse=False)  # a loop keeps the two computations apart

    def body(_: None, one: tuple[_Queries, _Keys | None]):
        queries, near = one
        return None, mix(queries, shared if near is None else _join(shared, near))

    _, sums = jax.lax.scan(body, None, (jax.tree.map(lambda x: _blocks(x, block), filled), near))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :T], sums)


def _blocks(x: Array, block: int) -> Array:
    return jnp.moveaxis(x.reshape(*x.shape[:-2], -1, block, x.shape[-1]), -3, 0)


def _cut(slots: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[..., start:stop, :], slots)


def _join(slots: Any, more: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=-2), slots, more)


def _in_segments(places: Places) -> Places:
    return replace(places, segments=jnp.ones_like(places.positions)) if places.segments is None else places
