"""Attention over blocks against the formula written as a loop, and against what a program without blocks would do."""

from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from seqlab.attend import RUNS, attend
from seqlab.types import Places

B, T, H, K = 2, 13, 4, 3

ROUNDING = 1e-5
"""Relative L2. A hundred roundings of 2^-24, more than a number meets in sums over at most 20 keys, add up to 6e-6."""
BFLOAT16 = 2.0**-6
"""Relative L2. An output meets three roundings of 2^-9 (weight, mixed value, output), a gradient five: 1e-2."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile takes the time


@dataclass(frozen=True)
class Case:
    causal: bool = True
    length: int = T
    cached: int = 0
    kv_heads: int = H
    segments: bool = False
    options: dict = field(default_factory=dict)
    biased: bool = False

    def build(self):
        """float64 arrays q, k, v and slopes of the bias, and the places of queries and keys."""
        rng, S = np.random.default_rng(0), self.cached + self.length
        q = rng.normal(size=(B, self.length, H, K))
        k, v = rng.normal(size=(2, B, S, self.kv_heads, K))
        slopes = rng.normal(size=H)
        new = np.arange(self.cached, S)
        positions, segments = np.tile(new, (B, 1)), np.ones((B, self.length), int)
        if self.segments:  # two packed sequences with padding between, before and behind
            segments[0] = np.repeat([1, 0, 2, 0], [4, 2, 5, self.length - 11])
            segments[1, :3] = 0
        # cache slots in no order, some of them empty
        slots = np.array([rng.permutation(self.cached) for _ in range(B)]).reshape(B, self.cached)
        filled = (rng.random(slots.shape) < 0.7).astype(int) if self.segments else np.ones_like(slots)
        keys = np.concatenate([slots, positions], 1), np.concatenate([filled, segments], 1)
        if not self.segments:
            return (q, k, v, slopes), (positions[:1], None), (keys[0], None)
        return (q, k, v, slopes), (positions, segments), keys


CASES = {
    "causal": Case(),
    "encoder": Case(causal=False),
    "one token": Case(length=1),
    "a block of one": Case(length=7),
    "window": Case(options={"window": 3}),
    "window of one": Case(options={"window": 1}),
    "wide window": Case(options={"window": 8}),
    "encoder, window": Case(causal=False, options={"window": 2}),
    "encoder, wide window": Case(causal=False, options={"window": 6}),
    "segments": Case(segments=True),
    "encoder, segments": Case(causal=False, segments=True),
    "cache": Case(cached=6, segments=True),
    "cache, one token": Case(length=1, cached=9, segments=False),
    "cache, window": Case(cached=6, options={"window": 3}),
    "cache, wide window": Case(cached=6, options={"window": 8}, segments=True),
    "encoder, cache": Case(causal=False, cached=6, options={"window": 4}),
    "grouped": Case(kv_heads=2),
    "multi-query": Case(kv_heads=1),
    "bias": Case(biased=True),
    "soft cap": Case(options={"soft_cap": 0.5}),
    "all": Case(cached=6, kv_heads=2, segments=True, biased=True, options={"window": 3, "soft_cap": 0.8}),
}
names = pytest.mark.parametrize("name", CASES)


def slowly(case, q, k, v, slopes):
    """The docstring of `attend`, pair by pair."""
    _, (at, segment), (key_at, key_segment) = case.build()
    window, cap = case.options.get("window"), case.options.get("soft_cap")
    y = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        scores, values = [], []
        for s in range(k.shape[1]):
            apart = at[b % len(at), t] - key_at[b, s]
            seen = not case.causal or apart >= 0
            seen &= window is None or abs(apart) < window
            if segment is not None:
                seen &= segment[b, t] == key_segment[b, s] > 0
            if seen:
                score = 0.7 * q[b, t, h] @ k[b, s, h * case.kv_heads // H]
                score = cap * np.tanh(score / cap) if cap else score
                scores.append(score + slopes[h] * np.sin(apart) * case.biased)
                values.append(v[b, s, h * case.kv_heads // H])
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            y[b, t, h] = weights @ np.array(values) / weights.sum()
    return y


def call(case, attention, **more):
    """The same as a function of q, k, v and slopes."""
    _, query, key = case.build()
    query, key = (
        Places(*(None if x is None else jnp.asarray(x, jnp.int32) for x in places)) for places in (query, key)
    )

    def function(q, k, v, slopes):
        def bias(at, key_at):
            apart = (at[:, :, None] - key_at[:, None, :]).astype(jnp.float32)
            return slopes[None, :, None, None] * jnp.sin(apart)[:, None]

        options = case.options | ({"bias": bias} if case.biased else {})
        return attention(q, k, v, query, key, causal=case.causal, scale=0.7, **options, **more)

    return function


def dense(q, k, v, query, key, *, causal, scale, window=None, soft_cap=None, bias=None):
    """All scores at once, with a softmax that JAX differentiates."""
    k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("BTHK,BSHK->BHTS", q, k)
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias:
        scores = scores + bias(query.positions, key.positions)
    apart = query.positions[:, :, None] - key.positions[:, None, :]
    seen = apart >= 0 if causal else apart == apart
    if window:
        seen &= abs(apart) < window
    if query.segments is not None:
        seen &= (query.segments[:, :, None] == key.segments[:, None, :]) & (query.segments > 0)[:, :, None]
    seen = jnp.broadcast_to(seen[:, None], scores.shape)
    return jnp.einsum("BHTS,BSHK->BTHK", jnp.where(seen, jax.nn.softmax(scores, where=seen), 0), v)


def inputs(case, dtype=jnp.float32, scale=1.0):
    q, k, v, slopes = case.build()[0]
    return *(jnp.asarray(scale * x, dtype) for x in (q, k, v)), jnp.float32(slopes)


def compiled(function):
    return jax.jit(function, compiler_options=QUICK)


def read_out(function):
    def loss(*arrays):
        y = function(*arrays).astype(jnp.float32)
        return (y * jax.random.normal(jax.random.key(1), y.shape)).sum()

    return loss


def gradients(function):
    return compiled(jax.grad(read_out(function), argnums=(0, 1, 2, 3)))


def distance(y, reference):
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / (np.linalg.norm(reference) or 1.0)


expected = cache(lambda name: slowly(CASES[name], *CASES[name].build()[0]))


@names
@pytest.mark.parametrize("block", [3, 64])
def test_it_is_the_formula(name, block):
    y = compiled(call(CASES[name], attend, block=block))(*inputs(CASES[name]))
    assert distance(y, expected(name)) <= ROUNDING


@names
def test_its_gradients_are_those_of_all_scores_at_once(name):
    case = CASES[name]
    actual = gradients(call(case, attend, block=3))(*inputs(case))
    for gradient, reference in zip(actual, gradients(call(case, dense))(*inputs(case)), strict=True):
        assert distance(gradient, reference) <= ROUNDING


@pytest.mark.parametrize("block", [1, 7, T])
@pytest.mark.parametrize("name", ["all", "encoder, window"])
def test_the_size_of_a_block_changes_nothing(name, block):
    case = CASES[name]
    pairs = zip(*(gradients(call(case, attend, block=b))(*inputs(case)) for b in (block, 3)), strict=True)
    for gradient, reference in pairs:
        assert distance(gradient, reference) <= ROUNDING


@pytest.mark.parametrize("name", ["all", "causal", "encoder, window"])
def test_derivatives_in_both_modes_are_the_finite_difference(name):
    case = CASES[name]
    point, direction = case.build()[0], [np.random.default_rng(1).normal(size=x.shape) for x in case.build()[0]]
    h = 1e-5  # in float64: rounding by 1e-11, curvature by 1e-10
    ahead, behind = ([x + sign * h * d for x, d in zip(point, direction, strict=True)] for sign in (1, -1))
    slope = (slowly(case, *ahead) - slowly(case, *behind)) / (2 * h)
    function, arrays = call(case, attend, block=3), inputs(case)
    tangents = tuple(jnp.float32(d) for d in direction)
    forward = compiled(lambda arrays: jax.jvp(function, arrays, tangents)[1])(arrays)
    assert distance(forward, slope) <= ROUNDING
    probe = np.asarray(jax.random.normal(jax.random.key(1), slope.shape), np.float64)
    reverse = sum(
        (np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients(function)(*arrays), direction, strict=True)
    )
    # the sum may cancel: against the length of what is summed
    assert abs(reverse - (probe * slope).sum()) <= ROUNDING * np.linalg.norm(probe * slope)


def test_a_population_is_its_members():
    case = CASES["all"]
    gradient_of = jax.grad(read_out(call(case, attend, block=3)), argnums=(0, 1, 2, 3))
    alone, members = compiled(gradient_of), [inputs(case, scale=s) for s in (1.0, 0.5, -2.0)]
    together = compiled(jax.vmap(gradient_of))(*(jnp.stack(arrays) for arrays in zip(*members, strict=True)))
    for i, member in enumerate(members):
        for gradient, reference in zip(together, alone(*member), strict=True):
            assert distance(gradient[i], reference) <= ROUNDING


def test_a_scan_over_checkpointed_layers_is_a_loop_over_layers():
    layer, scales = call(CASES["all"], attend, block=3), jnp.array([1.0, -0.8])

    def scanned(q, k, v, slopes):
        step = jax.checkpoint(lambda x, scale: (x + layer(x * scale, k, v, slopes * scale), None))
        return jax.lax.scan(step, q, scales)[0]

    def looped(q, k, v, slopes):
        for scale in scales:
            q = q + layer(q * scale, k, v, slopes * scale)
        return q

    arrays = inputs(CASES["all"])
    for gradient, reference in zip(gradients(scanned)(*arrays), gradients(looped)(*arrays), strict=True):
        assert distance(gradient, reference) <= ROUNDING


def test_a_bias_may_read_a_parameter_of_nnx():
    case = CASES["bias"]
    q, k, v, slopes = inputs(case)

    def loss(module):
        return read_out(call(case, attend, block=3))(q, k, v, module["slopes"])

    gradient = nnx.jit(nnx.grad(loss))(nnx.Dict(slopes=nnx.Param(slopes)))["slopes"][...]
    assert distance(gradient, gradients(call(case, attend, block=3))(q, k, v, slopes)[3]) <= ROUNDING


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("name", ["segments", "all"])
def test_a_query_that_sees_nothing_gives_zero_and_changes_nothing(name, block):
    case = CASES[name]
    blind = (expected(name) == 0).all((2, 3))
    assert 0 < blind.sum() < blind.size

    @compiled
    def pulled(of, arrays):
        y, pull = jax.vjp(call(case, attend, block=block), *arrays)
        return y, pull(jnp.broadcast_to(of[:, :, None, None], y.shape))

    for scale in (1.0, 1e4):
        y, gradients_of_all = pulled(jnp.ones(blind.shape), inputs(case, scale=scale))
        _, gradients_of_blind = pulled(jnp.float32(blind), inputs(case, scale=scale))
        assert (np.asarray(y)[blind] == 0).all() and np.isfinite(y).all()
        assert all(jnp.isfinite(gradient).all() for gradient in gradients_of_all)
        assert all((gradient == 0).all() for gradient in gradients_of_blind)


@pytest.mark.parametrize("block", [3, 64])
def test_no_score_is_large_enough_to_see_what_is_forbidden(block):
    case = CASES["causal"]
    q, k, v, slopes = inputs(case, scale=1e4)
    function = compiled(call(case, attend, block=block))
    y = function(q, k, v, slopes)
    changed = function(q, k.at[:, 7:].multiply(-1e3), v.at[:, 7:].add(1e6), slopes)
    assert (y[:, :7] == changed[:, :7]).all()
    assert (y[:, 7:] != changed[:, 7:]).any()


@pytest.mark.parametrize("name", ["all", "causal"])
def test_bfloat16_rounds_and_no_more(name):
    case = CASES[name]
    rounded = inputs(case, jnp.bfloat16)
    function = call(case, attend, block=3)
    y = compiled(function)(*rounded)
    assert y.dtype == jnp.bfloat16
    assert distance(y, slowly(case, *(np.asarray(x, np.float64) for x in rounded))) <= BFLOAT16
    single = (*(x.astype(jnp.float32) for x in rounded[:3]), rounded[3])
    for gradient, reference in zip(gradients(function)(*rounded), gradients(function)(*single), strict=True):
        assert distance(gradient, reference) <= BFLOAT16


def test_no_tokens_are_no_outputs():
    case = Case(length=0, cached=5)
    y, pull = jax.vjp(call(case, attend), *inputs(case))
    assert y.shape == (B, 0, H, K)
    assert all((gradient == 0).all() for gradient in pull(y))


def products(program, times=1):
    """The multiplications of all matrix products of a traced program."""
    program, total = (program.jaxpr if isinstance(program, ClosedJaxpr) else program), 0
    for equation in program.eqns:
        params = equation.params
        if equation.primitive.name == "dot_general":
            left = equation.invars[0].aval.shape
            summed = [left[i] for i in params["dimension_numbers"][0][0]]
            total += times * int(np.prod(equation.outvars[0].aval.shape) * np.prod(summed))
        inner = [p for p in params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
        total += sum(products(p, times * params.get("length", 1)) for p in inner)
    return total


def cost(length, cached=0, backward=False, block=4, **options):
    """Multiplications, of which all scores at once take length^2 forward."""
    query, key = (Places(jnp.arange(n)[None]) for n in (length, cached + length))

    def function(q, k, v):
        return attend(q, k, v, query, key, scale=1.0, block=block, **options).sum()

    arrays = (jnp.ones((1, n, 1, 1)) for n in (length, cached + length, cached + length))
    return products(jax.make_jaxpr(jax.grad(function, (0, 1, 2)) if backward else function)(*arrays)) / 2


def test_blocks_that_no_query_sees_are_not_computed():
    n = 64
    assert cost(n, causal=False) == n**2
    assert cost(n, causal=True) == n**2 * (1 + 1 / RUNS) / 2
    assert cost(n, causal=True, cached=10) == cost(n, causal=True) + 10 * n
    assert cost(n, causal=True, backward=True) == 3.5 * cost(n, causal=True)  # 2 products forward, 5 backward
    assert cost(n, causal=True, window=5) == 2 * 4 * n  # a block and the one before
    assert cost(n, causal=True, window=6) == 3 * 4 * n
    assert cost(n, causal=False, window=5) == 3 * 4 * n
    assert cost(n, causal=True, window=5, cached=10) == (2 * 4 + 10) * n
    assert cost(n, causal=True, window=40) < cost(n, causal=True)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "window": 100}], ids=str)
def test_memory_of_a_gradient_is_linear_in_the_length(options):
    def memory(length):
        place = Places(jnp.arange(length)[None])
        array = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

        def loss(q, k, v):
            return (attend(q, k, v, place, place, scale=1.0, **options) ** 2).sum()

        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(array, array, array).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert memory(8192) <= 4.1 * memory(2048)  # were it quadratic, 16 times


def test_what_cannot_be_is_refused():
    q, k = jnp.ones((1, 4, 3, 2)), jnp.ones((1, 3, 2, 2))
    query, key = (Places(jnp.arange(n)[None]) for n in (4, 3))
    with pytest.raises(ValueError, match=r"^3 heads of queries cannot share 2 heads of keys; the first must be a mul"):
        attend(q, k, k, query, key, causal=False, scale=1.0)
    with pytest.raises(ValueError, match=r"^window=0 leaves a query nothing to see; use 1 or more$"):
        attend(q, q, q, query, query, causal=True, scale=1.0, window=0)
    with pytest.raises(ValueError, match=r"^causal attention needs a key for each of the 4 queries, not 3$"):
        attend(q[:, :, :2], k, k, query, key, causal=True, scale=1.0)
