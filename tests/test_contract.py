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
"""Relative L2. The two sides of a law differ in the order of their sums: a hundred roundings of 2^-24, more than a
number meets on its way through two blocks, add up to 6e-6."""
VISIBLE = 1e-3
"""Relative L2. What must differ is a share of the output, a tenth or more in these small random models: no rounding."""

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
        return SequenceModel(
            V,
            width=D,
            depth=2,
            mixer=mixer,
            position=position,
            bidirectional=DIRECTIONS[self.direction],
            expansion=2,
            rngs=nnx.Rngs(0),
        )


def rows():
    for row in (Row(*names) for names in product(MIXERS, POSITIONS, DIRECTIONS)):
        impossible = row.position == "rope" and not row.attends
        impossible |= row.mixer == "encoder" and row.direction != "forward"
        # compiled for nothing: what the other scan, or the other way to join two directions, has met already
        repeated = row.mixer == "ssm_parallel" and (row.position, row.direction) != ("none", "forward")
        repeated |= row.mixer == "attention" and row.direction == "concat" and row.position != "none"
        if not impossible and not repeated:
            yield row


ROWS = list(rows())
PLAIN_ROWS = [row for row in ROWS if row.position == "none" and row.direction == "forward"]


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

        def reach(params, x, mask):
            """The outputs, and what a random change of x_s does to them for each s, to first order [S, B, T, D]."""
            probe = jax.random.normal(jax.random.key(1), x.shape)

            def push(here):
                return jax.jvp(lambda x: hidden(params, x, mask), (x,), (probe * here[None, :, None],))

            return jax.vmap(push, out_axes=(None, 0))(jnp.eye(x.shape[1]))

        def gradients(params, x, mask):
            """Of a random read-out, by parameter and by input."""
            y, pull = jax.vjp(lambda params, x: hidden(params, x, mask), params, x)
            return pull(jax.random.normal(jax.random.key(1), y.shape))

        def walk(params, tokens):
            model = nnx.merge(self.graph, params)
            return jax.lax.scan(model.step, model.init_state(B, T), tokens.T)[1].swapaxes(0, 1)

        functions = (hidden, reach, gradients, walk)
        self.hidden, self.reach, self.gradients, self.walk = (jax.jit(f, compiler_options=quick) for f in functions)
        self.x = jax.random.normal(jax.random.key(2), (B, T, D))
        self.y = self.hidden(self.params, self.x)


observe = cache(Observed)


def spread(x, places, filling=0.0):
    """The tokens at their places among padding, and the mask that says which they are."""
    here = (np.arange(B)[:, None], places)
    padding = jnp.full((B, PADDED, D), filling, jnp.float32)
    return padding.at[here].set(x), jnp.zeros((B, PADDED), bool).at[here].set(True)


def distance(y, reference):
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


@laws(ROWS)
def test_causal_models_alone_are_blind_to_the_future(row):
    seen = observe(row)
    x = jax.random.normal(jax.random.key(3), (B, PADDED, D))
    support = np.abs(seen.reach(seen.params, x, jnp.ones((B, PADDED), bool))[1]).sum((1, 3)).T  # T S
    future = np.triu(np.ones(support.shape, bool), 1)
    assert (support[~future] > 0).all()
    assert (support[future] == 0).all() if row.causal else (support[future] > 0).all()
    assert seen.model.causal == row.causal


@laws(ROWS)
@pytest.mark.parametrize("where", PLACES)
def test_padding_changes_nothing_but_positions(row, where):
    seen = observe(row)
    y = seen.reach(seen.params, *spread(seen.x, PLACES[where]))[0]
    change = distance(np.take_along_axis(np.asarray(y), PLACES[where][..., None], 1), seen.y)
    # absolute positions are moved by padding before, distances by padding between
    moved = {"none": (), "sinusoidal": ("before", "between"), "rope": ("between",)}[row.position]
    assert change >= VISIBLE if where in moved else change <= ROUNDING


@laws(ROWS)
def test_what_stands_in_the_padding_is_never_seen(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["between"])
    y, change = seen.reach(seen.params, x, mask)
    other, _ = seen.reach(seen.params, *spread(seen.x, PLACES["between"], filling=100.0))
    assert (y == other)[mask].all()
    support = jnp.abs(change).sum(-1).transpose(1, 2, 0)  # B T S
    assert (support[mask[:, :, None] & ~mask[:, None, :]] == 0).all()


@laws(PLAIN_ROWS)
def test_a_row_of_nothing_but_padding_gives_finite_gradients(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["between"])
    mask = mask.at[0].set(False)
    for leaf in jax.tree.leaves((seen.reach(seen.params, x, mask), seen.gradients(seen.params, x, mask))):
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


@laws([row for row in ROWS if row.position == "none" and row.direction != "concat"])
def test_one_token_is_a_sequence(row):
    seen = observe(row)
    x, mask = spread(seen.x, PLACES["behind"])
    alone = seen.reach(seen.params, x, mask & (jnp.arange(PADDED) == 0)[None])[0][:, :1]
    assert distance(seen.hidden(seen.params, seen.x[:, :1]), alone) <= ROUNDING


@laws([row for row in ROWS if row.mixer == "ssm_parallel"])
def test_the_parallel_scan_gives_the_outputs_and_gradients_of_the_sequential_one(row):
    parallel, sequential = observe(row), observe(Row("ssm", row.position, row.direction))
    assert distance(parallel.y, sequential.y) <= ROUNDING
    x, mask = spread(parallel.x, PLACES["between"])
    pair = (jax.tree.leaves(seen.gradients(seen.params, x, mask)) for seen in (parallel, sequential))
    for leaf, reference in zip(*pair, strict=True):
        assert jnp.linalg.norm(leaf - reference) <= ROUNDING * jnp.linalg.norm(reference)


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
        return nnx.merge(seen.graph, params)(tokens, mask).sum()

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
        "shift": row.position == "sinusoidal",
        "padding": False,
    } | ({"token_by_token": False} if row.causal else {})
    assert expected(observe(row).model) == {name: "nonzero" if yes else "zero" for name, yes in nonzero.items()}
