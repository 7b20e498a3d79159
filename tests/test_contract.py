"""The laws that every mixer obeys with every position scheme in every direction.

Each row is built once, in a small SequenceModel, and compiled once; the laws compare what it gives on related inputs.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import ATTENDING, MIXERS, POSITIONS
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from seqlab.measures.controls import expected
from seqlab.mixers.base import NoStepError
from seqlab.mlp import MLP
from seqlab.model import SequenceModel, packed

B, T, PADDED, D, V = 2, 8, 12, 8, 11

ROUNDING = 1e-5
"""Relative L2. The two sides of a law differ in the order of their sums: a hundred roundings of 2^-24, more than a
number meets on its way through two blocks, add up to 6e-6."""
VISIBLE = 1e-3
"""Relative L2. What must differ is a share of the output, a tenth or more in these small random models: no rounding."""

DIRECTIONS = {"forward": False, "sum": True, "concat": "concat"}

PLACES = {
    "behind": np.array([range(8), range(8)]),
    "before": np.array([range(4, 12), range(4, 12)]),
    "between": np.array([[0, 1, 3, 4, 5, 8, 10, 11], [1, 2, 3, 6, 7, 8, 9, 11]]),
}
"""Where the T real tokens of the two rows stand among padding."""


@dataclass(frozen=True)
class Row:
    mixer: str
    position: str
    direction: str

    def __str__(self):
        return f"{self.mixer}-{self.position}-{self.direction}"

    @property
    def attends(self):
        return self.mixer in ATTENDING

    @property
    def causal(self):
        return self.direction == "forward" and self.mixer != "encoder"

    @property
    def span(self):
        """How many tokens back two layers see."""
        return 2 * (3 - 1) if self.mixer == "sliding_window" else PADDED

    @property
    def sees_order(self):
        return self.mixer != "encoder" or self.position != "none"

    def build(self):
        position, mixer = POSITIONS[self.position], MIXERS[self.mixer]
        if self.attends:
            mixer = partial(mixer, position=position)
        return SequenceModel(
            V,
            width=D,
            depth=2,
            mixer=mixer,
            position=position,
            bidirectional=DIRECTIONS[self.direction],
            mlp=partial(MLP, expansion=2),
            rngs=nnx.Rngs(0),
        )


def rows():
    """Every mixer with every position scheme and every direction, but for what would be compiled for nothing: where
    a position scheme or the two directions do not meet the mixer, a few mixers stand for all.
    """
    for row in (Row(*names) for names in product(MIXERS, POSITIONS, DIRECTIONS)):
        one_way = row.direction == "forward"
        if row.attends:
            schemes = POSITIONS if row.mixer in ("attention", "encoder") else ("none", "rope", "t5")
            both_ways = row.mixer == "attention" and row.position in ("none", "t5")
        else:
            schemes = ("none", "sinusoidal", "learned") if row.mixer == "gru" else ("none", "sinusoidal")
            both_ways = row.position == "none" and row.mixer in ("gru", "ssm", "mamba2", "rglru")
        both_ways &= row.direction == "sum" or row.mixer in ("gru", "attention")
        if row.position in schemes and (one_way or both_ways):
            yield row


ROWS = list(rows())
PLAIN_ROWS = [row for row in ROWS if row.position == "none" and row.direction == "forward"]


def laws(rows):
    """What joins a mixer with other parts is slow: there is much of it, and a plain mixer fails first."""
    fast = [row in PLAIN_ROWS or row.mixer in ("gru", "attention") for row in rows]
    marked = [pytest.param(row, marks=() if quick else pytest.mark.slow) for row, quick in zip(rows, fast, strict=True)]
    return pytest.mark.parametrize("row", marked, ids=str)


class Observed:
    """A model, compiled, and its outputs `y` for the inputs `x`."""

    def __init__(self, row):
        self.model = row.build()
        self.graph, self.params = nnx.split(self.model)
        # to compile is all that takes time here, and this halves it
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

        def hidden(params, x, segments=None):
            return nnx.merge(self.graph, params).hidden(x, packed(segments))

        def reach(params, x, segments):
            """The outputs, and what a random change of x_s does to them for each s, to first order [S, B, T, D]."""
            probe = jax.random.normal(jax.random.key(1), x.shape)

            def push(here):
                return jax.jvp(lambda x: hidden(params, x, segments), (x,), (probe * here[None, :, None],))

            return jax.vmap(push, out_axes=(None, 0))(jnp.eye(x.shape[1]))

        def gradients(params, x, segments):
            """Of a random read-out, by parameter and by input."""
            y, pull = jax.vjp(lambda params, x: hidden(params, x, segments), params, x)
            return pull(jax.random.normal(jax.random.key(1), y.shape))

        def walk(params, tokens):
            model = nnx.merge(self.graph, params)
            return jax.lax.scan(model.step, model.init_state(B, T), tokens.T)[1].swapaxes(0, 1)

        def split(params, tokens, at):
            """The first `at` tokens at once; then the next one alone, or all the rest at once."""
            model, index = nnx.merge(self.graph, params), jnp.arange(T)[None] + jnp.zeros((B, 1), jnp.int32)
            state, first = model.prefill(model.init_state(B, T), tokens, (index < at).astype(jnp.int32))
            alone = model.step(state, jax.lax.dynamic_index_in_dim(tokens, at, 1, keepdims=False))[1]
            rest = model.prefill(state, jnp.roll(tokens, -at, axis=1), (index < T - at).astype(jnp.int32))[1]
            return model.unembed(first), alone, model.unembed(rest)

        functions = (hidden, reach, gradients, walk, split)
        self.hidden, self.reach, self.gradients, self.walk, self.split = (
            jax.jit(f, compiler_options=quick) for f in functions
        )
        self.x = jax.random.normal(jax.random.key(2), (B, T, D))
        self.y = self.hidden(self.params, self.x)


observe = cache(Observed)


def spread(x, places, filling=0.0):
    """The tokens at their places among padding, and the segments that say which they are."""
    here = (np.arange(B)[:, None], places)
    padding = jnp.full((B, PADDED, D), filling, jnp.float32)
    return padding.at[here].set(x), jnp.zeros((B, PADDED), jnp.int32).at[here].set(1)


def distance(y, reference):
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


@laws(ROWS)
def test_causal_models_alone_are_blind_to_the_future(row):
    seen = observe(row)
    x = jax.random.normal(jax.random.key(3), (B, PADDED, D))
    support = np.abs(seen.reach(seen.params, x, jnp.ones((B, PADDED), jnp.int32))[1]).sum((1, 3)).T  # T S
    behind = np.subtract.outer(range(PADDED), range(PADDED))  # how far s lies behind t
    future, seen_past = behind < 0, behind <= row.span
    assert (support[~future & seen_past] > 0).all() and (support[~future & ~seen_past] == 0).all()
    assert (support[future] == 0).all() if row.causal else (support[future] > 0).all()
    assert seen.model.causal == row.causal


@laws(ROWS)
@pytest.mark.parametrize("where", PLACES)
def test_padding_changes_nothing(row, where):
    seen = observe(row)
    y = seen.reach(seen.params, *spread(seen.x, PLACES[where]))[0]
    assert distance(np.take_along_axis(np.asarray(y), PLACES[where][..., None], 1), seen.y) <= ROUNDING


@laws(ROWS)
def test_what_stands_in_the_padding_is_never_seen(row):
    seen = observe(row)
    x, segments = spread(seen.x, PLACES["between"])
    mask = segments > 0
    y, change = seen.reach(seen.params, x, segments)
    other, _ = seen.reach(seen.params, *spread(seen.x, PLACES["between"], filling=100.0))
    assert (y == other)[mask].all()
    support = jnp.abs(change).sum(-1).transpose(1, 2, 0)  # B T S
    assert (support[mask[:, :, None] & ~mask[:, None, :]] == 0).all()


@laws(PLAIN_ROWS)
def test_a_row_of_nothing_but_padding_gives_finite_gradients(row):
    seen = observe(row)
    x, segments = spread(seen.x, PLACES["between"])
    segments = segments.at[0].set(0)
    for leaf in jax.tree.leaves((seen.reach(seen.params, x, segments), seen.gradients(seen.params, x, segments))):
        assert jnp.isfinite(leaf).all()


@laws(ROWS)
def test_order_is_invisible_to_an_encoder_without_positions_alone(row):
    seen = observe(row)
    order = jnp.array([3, 0, 7, 1, 6, 2, 5, 4])
    change = distance(seen.hidden(seen.params, seen.x[:, order]), seen.y[:, order])
    assert change >= VISIBLE if row.sees_order else change <= ROUNDING


@laws([row for row in PLAIN_ROWS if row.causal])
def test_token_by_token_gives_the_outputs_of_the_sequence(row):
    seen = observe(row)
    tokens = jax.random.randint(jax.random.key(4), (B, T), 0, V)
    whole = seen.model.unembed(seen.hidden(seen.params, seen.model.embed(tokens)))
    assert distance(seen.walk(seen.params, tokens), whole) <= ROUNDING


@laws([row for row in ROWS if row.causal])
@pytest.mark.parametrize("at", [0, 1, 3, T - 1])
def test_a_prefix_all_at_once_hands_over_its_state(row, at):
    seen = observe(row)
    tokens = jax.random.randint(jax.random.key(4), (B, T), 0, V)
    whole = seen.model.unembed(seen.hidden(seen.params, seen.model.embed(tokens)))
    first, alone, rest = seen.split(seen.params, tokens, jnp.int32(at))
    assert distance(alone, whole[:, at]) <= ROUNDING
    assert distance(jnp.concatenate([first[:, :at], rest[:, : T - at]], axis=1), whole) <= ROUNDING


@laws(ROWS)
def test_two_sequences_in_one_row_are_each_alone(row):
    seen = observe(row)
    other = jax.random.normal(jax.random.key(5), (B, PADDED - T - 1, D))
    behind, padding = len(other[0]), jnp.zeros((B, 1, D))
    orders = ([other, seen.x, padding], [seen.x, padding, other])
    x = jnp.concatenate([jnp.concatenate(parts, axis=1)[:1] for parts in orders])
    segments = jnp.array([[1] * behind + [2] * T + [0], [7] * T + [0] + [3] * behind])
    y = seen.reach(seen.params, x, segments)[0]
    assert distance(y[0, behind : behind + T], seen.y[0]) <= ROUNDING
    assert distance(y[1, :T], seen.y[0]) <= ROUNDING
    short, places = jnp.concatenate([other, jnp.zeros((B, PADDED - behind, D))], axis=1), jnp.arange(PADDED)[None]
    by_itself = seen.reach(seen.params, short, jnp.broadcast_to(places < behind, (B, PADDED)).astype(jnp.int32))[0]
    assert distance(y[0, :behind], by_itself[0, :behind]) <= ROUNDING
    assert distance(y[1, T + 1 :], by_itself[0, :behind]) <= ROUNDING


@laws([row for row in ROWS if not row.causal])
def test_a_bidirectional_model_has_no_step(row):
    with pytest.raises(NoStepError, match="no token-by-token form"):
        observe(row).model.init_state(1, 1)


@laws([row for row in ROWS if row.position == "none" and row.direction != "concat"])
def test_one_token_is_a_sequence(row):
    seen = observe(row)
    x, segments = spread(seen.x, PLACES["behind"])
    alone = seen.reach(seen.params, x, segments * (jnp.arange(PADDED) == 0).astype(jnp.int32)[None])[0][:, :1]
    assert distance(seen.hidden(seen.params, seen.x[:, :1]), alone) <= ROUNDING


def is_program(value):
    return isinstance(value, ClosedJaxpr | Jaxpr)


def float64s(program):
    """The float64 and complex128 arrays that a traced program computes; Python's own numbers are scalars."""
    for equation in (program.jaxpr if isinstance(program, ClosedJaxpr) else program).eqns:
        for inner in filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)):
            yield from float64s(inner)
        for aval in (v.aval for v in equation.outvars):
            if aval.shape and aval.dtype in (jnp.float64, jnp.complex128):
                yield aval


@laws(ROWS)
def test_nothing_is_computed_in_float64(row):
    seen = observe(row)
    tokens = jnp.zeros((B, T), jnp.int32)

    def loss(params, tokens, mask):
        return nnx.merge(seen.graph, params)(tokens, mask.astype(jnp.int32)).sum()

    # without x64 there would be no float64 to find; with it integers are 64 bits wide where nothing says otherwise
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert list(float64s(jax.make_jaxpr(lambda: jnp.ones(2))()))
        programs = [jax.make_jaxpr(jax.grad(loss))(seen.params, tokens, tokens == 0)]
        if row.causal:
            programs.append(jax.make_jaxpr(seen.model.step)(seen.model.init_state(B, T), tokens[:, 0]))
    for program in programs:
        assert not list(float64s(program))


@laws(ROWS)
def test_the_controls_expect_what_these_laws_say(row):
    nonzero = {
        "future": not row.causal,
        "order": row.sees_order,
        "shift": row.position in ("sinusoidal", "learned"),
        "padding": False,
        "packing": False,
    } | ({"token_by_token": False} if row.causal else {})
    assert expected(observe(row).model, T) == {name: "nonzero" if yes else "zero" for name, yes in nonzero.items()}
