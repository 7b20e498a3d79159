"""The laws that every mixer obeys with every position scheme in every direction. A new mixer is one line of `MIXERS`.

Each row is built once, in a small SequenceModel, and compiled once; the laws compare what it gives on related inputs.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from seqlab.measures.controls import expected
from seqlab.mixers.attention import Attention
from seqlab.mixers.rnn import GRU, LSTM, Elman
from seqlab.mixers.ssm import LRU
from seqlab.model import SequenceModel
from seqlab.positions import NoPosition, RoPE, Sinusoidal

B, T, PADDED, D, V = 2, 8, 12, 8, 11

ROUNDING = 1e-5
"""Relative L2. The two sides of a law differ in the order of their sums: a hundred roundings of 2^-24, more than a value
meets on its way through two blocks, add up to 6e-6."""
VISIBLE = 1e-3
"""Relative L2. What must differ does so by 1e-2 at least in these small random models: far from rounding on either side."""

MIXERS = {
    "rnn": Elman,
    "gru": GRU,
    "lstm": LSTM,
    "ssm": partial(LRU, state_size=6, scan="sequential"),
    "ssm_parallel": partial(LRU, state_size=6, scan="associative"),
    "attention": partial(Attention, heads=2),
    "encoder": partial(Attention, heads=2, causal=False),
}
POSITIONS = {"none": NoPosition(), "sinusoidal": Sinusoidal(), "rope": RoPE()}
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
        return self.mixer in ("attention", "encoder")

    @property
    def causal(self):
        return self.direction == "forward" and self.mixer != "encoder"

    @property
    def sees_order(self):
        return self.mixer != "encoder" or self.position != "none"

    def build(self):
        position, mixer = POSITIONS[self.position], MIXERS[self.mixer]
        if self.attends:
            mixer = partial(mixer, position=position)
        bidirectional = DIRECTIONS[self.direction]
        return SequenceModel(
            V, width=D, depth=2, mixer=mixer, position=position, bidirectional=bidirectional, expansion=2, rngs=nnx.Rngs(0)
        )


def rows():
    for row in (Row(*names) for names in product(MIXERS, POSITIONS, DIRECTIONS)):
        impossible = row.position == "rope" and not row.attends or row.mixer == "encoder" and row.direction != "forward"
        # what compiling again would tell nothing new about: positions do not touch the scan, nor do they the projection
        repeated = row.position != "none" and (row.mixer, row.direction) in (("attention", "concat"), ("ssm_parallel", "sum"))
        if not impossible and not repeated:
            yield row


ROWS = list(rows())


def laws(rows):
    return pytest.mark.parametrize("row", rows, ids=str)


class Observed:
    """A model, compiled, and its outputs `y` for the inputs `x`."""

    def __init__(self, row):
        self.model = row.build()
        self.graph, self.params = nnx.split(self.model)
        # to compile is all that takes time here, and this halves it
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

        def hidden(params, x, mask=None):
            return nnx.merge(self.graph, params).hidden(x, mask)

        def gradients(params, x, mask):
            """The outputs; for each t the gradients of a random read-out of y_t, by parameter and by input."""
            y, pull = jax.vjp(lambda params, x: hidden(params, x, mask), params, x)
            probe = jax.random.normal(jax.random.key(1), y.shape)
            return y, *jax.vmap(lambda here: pull(probe * here[None, :, None]))(jnp.eye(PADDED))

        def walk(params, tokens):
            model = nnx.merge(self.graph, params)
            return jax.lax.scan(model.step, model.init_state(B, T), tokens.T)[1].swapaxes(0, 1)

        self.hidden, self.gradients, self.walk = (jax.jit(f, compiler_options=quick) for f in (hidden, gradients, walk))
        self.x = jax.random.normal(jax.random.key(2), (B, T, D))
        self.y = self.hidden(self.params, self.x)


observe = cache(Observed)


def spread(x, places, filling=0.0):
    """The tokens at their places among padding, and the mask that says which they are."""
    here = (np.arange(B)[:, None], places)
    return jnp.full((B, PADDED, D), filling).at[here].set(x), jnp.zeros((B, PADDED), bool).at[here].set(True)


def distance(y, reference):
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


@laws(ROWS)
def test_causal_models_alone_are_blind_to_the_future(row):
    seen = observe(row)
    _, _, by_input = seen.gradients(seen.params, jax.random.normal(jax.random.key(3), (B, PADDED, D)), jnp.ones((B, PADDED), bool))
    support = np.abs(by_input).sum((1, 3))  # T S
    future = np.triu(np.ones(support.shape, bool), 1)
    assert (support[~future] > 0).all()
    assert (support[future] == 0).all() if row.causal else (support[future] > 0).all()
    assert seen.model.causal == row.causal


@laws(ROWS)
@pytest.mark.parametrize("where", PLACES)
def test_padding_changes_nothing_but_positions(row, where):
    seen = observe(row)
    y = seen.gradients(seen.params, *spread(seen.x, PLACES[where]))[0]
    change = distance(np.take_along_axis(np.asarray(y), PLACES[where][..., None], 1), seen.y)
    # absolute positions are moved by padding before, distances by padding between
    moved = {"none": (), "sinusoidal": ("before", "between"), "rope": ("between",)}[row.position]
    assert change >= VISIBLE if where in moved else change <= ROUNDING


@laws(ROWS)
def test_what_stands_in_the_padding_is_never_seen(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["between"])
    y, _, by_input = seen.gradients(seen.params, x, mask)
    other = seen.gradients(seen.params, *spread(seen.x, PLACES["between"], filling=100.0))[0]
    assert (y == other)[mask].all()
    leaks = jnp.abs(by_input).sum(-1).swapaxes(0, 1) * (mask[:, :, None] & ~mask[:, None, :])  # B T S
    assert (leaks == 0).all()


@laws(ROWS)
def test_a_row_of_nothing_but_padding_gives_finite_numbers(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["between"])
    for leaf in jax.tree.leaves(seen.gradients(seen.params, x, mask.at[0].set(False))):
        assert jnp.isfinite(leaf).all()


@laws(ROWS)
def test_order_is_invisible_to_an_encoder_without_positions_alone(row):
    seen = observe(row)
    order = jnp.array([3, 0, 7, 1, 6, 2, 5, 4])
    change = distance(seen.hidden(seen.params, seen.x[:, order]), seen.y[:, order])
    assert change >= VISIBLE if row.sees_order else change <= ROUNDING


@laws([row for row in ROWS if row.causal])
def test_token_by_token_gives_the_outputs_of_the_sequence(row):
    seen = observe(row)
    tokens = jax.random.randint(jax.random.key(4), (B, T), 0, V)
    whole = seen.model.unembed(seen.hidden(seen.params, seen.model.embed(tokens)))
    assert distance(seen.walk(seen.params, tokens), whole) <= ROUNDING


@laws([row for row in ROWS if not row.causal])
def test_a_bidirectional_model_has_no_step(row):
    with pytest.raises(NotImplementedError, match="no token-by-token form"):
        observe(row).model.init_state(1, 1)


@laws([row for row in ROWS if row.position == "none"])
def test_one_token_is_a_sequence(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["behind"])
    alone = seen.gradients(seen.params, x, mask & (jnp.arange(PADDED) == 0)[None])[0][:, :1]
    assert distance(seen.hidden(seen.params, seen.x[:, :1]), alone) <= ROUNDING


@laws([row for row in ROWS if row.mixer == "ssm_parallel"])
def test_the_parallel_scan_gives_the_outputs_and_gradients_of_the_sequential_one(row):
    parallel, sequential = observe(row), observe(Row("ssm", row.position, row.direction))
    assert distance(parallel.y, sequential.y) <= ROUNDING
    x, mask = spread(parallel.x, PLACES["between"])
    pair = (jax.tree.leaves(seen.gradients(seen.params, x, mask)) for seen in (parallel, sequential))
    for leaf, reference in zip(*pair, strict=True):
        assert jnp.linalg.norm(leaf - reference) <= ROUNDING * jnp.linalg.norm(reference)


def float64s(program):
    """The float64 and complex128 arrays that a traced program computes; Python's own numbers are scalars."""
    for equation in program.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: isinstance(p, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from float64s(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
        for aval in (v.aval for v in equation.outvars):
            if aval.shape and jnp.issubdtype(aval.dtype, jnp.inexact) and jnp.finfo(aval.dtype).bits == 64:
                yield equation


@laws(ROWS)
def test_nothing_is_computed_in_float64(row):
    seen = observe(row)
    tokens = jnp.zeros((B, T), jnp.int32)

    def loss(params, tokens, mask):
        return nnx.merge(seen.graph, params)(tokens, mask).sum()

    with jax.enable_x64(True):  # else there would be no float64 to find
        assert list(float64s(jax.make_jaxpr(lambda: jnp.ones(2) * 2)().jaxpr))
        programs = [jax.make_jaxpr(jax.grad(loss))(seen.params, tokens, tokens == 0)]
        if row.causal:
            programs.append(jax.make_jaxpr(seen.model.step)(seen.model.init_state(B, T), tokens[:, 0]))
    for program in programs:
        assert not list(float64s(program.jaxpr))


@laws(ROWS)
def test_the_controls_expect_what_these_laws_say(row):
    nonzero = {"future": not row.causal, "order": row.sees_order, "shift": row.position == "sinusoidal", "padding": False}
    nonzero |= {"token_by_token": False} if row.causal else {}
    assert expected(observe(row).model) == {name: "nonzero" if yes else "zero" for name, yes in nonzero.items()}
