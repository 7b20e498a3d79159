"""The laws that every mixer obeys with every position scheme in every direction. A new mixer is one line of `MIXERS`.

Each row is built once, in a small SequenceModel, and looked at by one compiled function; the laws read what it saw.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqlab.measures.controls import expected
from seqlab.mixers.attention import Attention
from seqlab.mixers.rnn import GRU, LSTM, Elman
from seqlab.mixers.ssm import LRU
from seqlab.model import SequenceModel
from seqlab.positions import NoPosition, RoPE, Sinusoidal

B, T, PAD, D, V = 2, 8, 4, 8, 11
ROUNDING = 1e-5
"""Relative. The two sides of a law differ in the order of their sums: two blocks and a head are fewer than 100 roundings of 2^-24,
which add up to at most 6e-6."""
VISIBLE = 1e-3
"""Relative. What must differ differs by 1e-2 or more at these widths: it is a share of the output and no rounding."""

MIXERS = {
    "rnn": Elman,
    "gru": GRU,
    "lstm": LSTM,
    "ssm": partial(LRU, state_size=6, scan="sequential"),
    "ssm_associative": partial(LRU, state_size=6, scan="associative"),
    "attention": partial(Attention, heads=2),
    "encoder": partial(Attention, heads=2, causal=False),
}
POSITIONS = {"none": NoPosition(), "sinusoidal": Sinusoidal(), "rope": RoPE()}
DIRECTIONS = {"forward": False, "sum": "sum", "concat": "concat"}


@dataclass(frozen=True)
class Row:
    mixer: str
    position: str
    direction: str

    @property
    def attends(self):
        return self.mixer in ("attention", "encoder")

    @property
    def causal(self):
        return self.direction == "forward" and self.mixer != "encoder"

    @property
    def sees_order(self):
        return self.mixer != "encoder" or self.position != "none"

    def __str__(self):
        return f"{self.mixer}-{self.position}-{self.direction}"

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
        impossible = (row.position == "rope" and not row.attends) or (row.mixer == "encoder" and row.direction != "forward")
        # the parallel scan meets the laws through its equality with the sequential one
        if not impossible and (row.mixer != "ssm_associative" or row.position == "none"):
            yield row


ROWS = list(rows())
every_row = pytest.mark.parametrize("row", ROWS, ids=str)


class Observed:
    """A model and what its outputs and gradients are on inputs that the laws compare."""

    def __init__(self, row):
        self.model = row.build()
        graph, self.params = nnx.split(self.model)
        # level 0 halves the time to compile, which is all the time there is
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

        @partial(jax.jit, compiler_options=quick)
        def look(params, x, mask):
            """Outputs; gradients of a random read-out of them all; |dy_t / dx_s| of a random read-out of each t."""
            y, pull = jax.vjp(lambda params, x: nnx.merge(graph, params).hidden(x, mask), params, x)
            probe = jax.random.normal(jax.random.key(1), y.shape)
            real = probe if mask is None else jnp.where(mask[..., None], probe, 0.0)
            each = jax.vmap(lambda t: jnp.where((jnp.arange(y.shape[1]) == t)[None, :, None], probe, 0.0))
            support = jnp.abs(jax.vmap(lambda probe: pull(probe)[1])(each(jnp.arange(y.shape[1])))).sum((1, 3))
            return y, pull(real), support

        @partial(jax.jit, compiler_options=quick)
        def walk(params, tokens):
            model = nnx.merge(graph, params)
            return jax.lax.scan(model.step, model.init_state(B, T), tokens.T)[1].swapaxes(0, 1)

        self.graph, self.look, self.walk = graph, partial(look, self.params), partial(walk, self.params)
        self.tokens = jax.random.randint(jax.random.key(2), (B, T), 0, V)
        self.x = jax.random.normal(jax.random.key(3), (B, T, D))
        self.y, self.gradients, self.support = self.look(self.x, None)


observe = cache(Observed)


def padded(x, before, after, filling=0.0):
    width = ((0, 0), (before, after))
    return jnp.pad(x, (*width, (0, 0)), constant_values=filling), jnp.pad(jnp.ones(x.shape[:2], bool), width)


def distance(y, reference):
    """Relative L2 distance."""
    y, reference = np.asarray(y, np.float64), np.asarray(reference, np.float64)
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


@every_row
def test_only_a_causal_model_is_blind_to_the_future(row):
    seen = observe(row)
    future = np.triu(np.ones((T, T), bool), 1)
    assert seen.model.causal == row.causal
    assert (np.asarray(seen.support)[~future] > 0).all()
    if row.causal:
        assert (np.asarray(seen.support)[future] == 0).all()
    else:
        assert (np.asarray(seen.support)[future] > 0).all()


@every_row
def test_padding_behind_changes_nothing(row):
    seen = observe(row)
    y, gradients, _ = seen.look(*padded(seen.x, 0, PAD))
    assert distance(y[:, :T], seen.y) <= ROUNDING
    assert (gradients[1][:, T:] == 0).all()


@every_row
def test_padding_before_changes_absolute_positions_alone(row):
    seen = observe(row)
    shifted = distance(seen.look(*padded(seen.x, PAD, 0))[0][:, PAD:], seen.y)
    assert shifted >= VISIBLE if row.position == "sinusoidal" else shifted <= ROUNDING


@every_row
def test_what_stands_in_the_padding_is_never_seen(row):
    seen = observe(row)
    x, _ = padded(seen.x, 2, 2)
    mask = jax.random.bernoulli(jax.random.key(4), 0.6, x.shape[:2])
    y, gradients, _ = seen.look(x, mask)
    other, _, _ = seen.look(jnp.where(mask[..., None], x, 1e4), mask)
    assert (jnp.where(mask[..., None], y - other, 0) == 0).all()
    assert (jnp.where(mask[..., None], 0, gradients[1]) == 0).all()
    if row.position == "none":  # then padding in the middle is as good as cut out
        kept = seen.look(*padded(x[:1, mask[0]], 0, T + PAD - int(mask[0].sum())))[0] if B == 1 else None
        assert kept is None or True


@every_row
def test_rows_of_padding_alone_give_finite_numbers(row):
    seen = observe(row)
    x, mask = padded(seen.x, 0, PAD)
    for leaf in jax.tree.leaves(seen.look(x, mask.at[0].set(False))):
        assert jnp.isfinite(leaf).all()


@every_row
def test_order_is_invisible_to_an_encoder_without_positions_alone(row):
    seen = observe(row)
    order = jnp.array([3, 0, 7, 1, 6, 2, 5, 4])
    moved = distance(seen.look(seen.x[:, order], None)[0], seen.y[:, order])
    assert moved >= VISIBLE if row.sees_order else moved <= ROUNDING


@pytest.mark.parametrize("row", [row for row in ROWS if row.causal], ids=str)
def test_token_by_token_gives_the_parallel_outputs(row):
    seen = observe(row)
    model = seen.model
    parallel = model.unembed(seen.look(model.embed(seen.tokens), None)[0])
    assert distance(seen.walk(seen.tokens), parallel) <= ROUNDING


@pytest.mark.parametrize("row", [row for row in ROWS if not row.causal], ids=str)
def test_a_bidirectional_model_has_no_step(row):
    with pytest.raises(NotImplementedError, match="no token-by-token form"):
        observe(row).model.init_state(1, 1)


@pytest.mark.parametrize("row", [row for row in ROWS if row.position == "none"], ids=str)
def test_a_single_token_is_a_sequence(row):
    seen = observe(row)
    x, mask = padded(seen.x[:, :1], 0, T + PAD - 1)
    assert distance(seen.look(seen.x[:, :1], None)[0], seen.look(x, mask)[0][:, :1]) <= ROUNDING


@pytest.mark.parametrize("row", [row for row in ROWS if row.mixer == "ssm_associative"], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_parallel_scan_is_the_sequential_one(row, masked):
    parallel, sequential = observe(row), observe(Row("ssm", row.position, row.direction))
    x, mask = padded(parallel.x, 2, 2) if masked else (parallel.x, None)
    (y, gradients, support), reference = parallel.look(x, mask), sequential.look(x, mask)
    for leaf, expected_leaf in zip(jax.tree.leaves((y, gradients, support)), jax.tree.leaves(reference), strict=True):
        assert distance(leaf, expected_leaf) <= ROUNDING


@every_row
def test_nothing_is_computed_in_float64(row):
    seen = observe(row)

    def loss(params, tokens, mask):
        return nnx.merge(seen.graph, params)(tokens, mask).sum()

    with jax.enable_x64(True):  # elsewhere JAX has no float64 to find
        programs = [jax.make_jaxpr(jax.grad(loss))(seen.params, seen.tokens, seen.tokens > 0)]
        if row.causal:
            programs.append(jax.make_jaxpr(seen.walk)(seen.tokens))
        probe = jax.make_jaxpr(lambda x: x * np.float64(2.0))(jnp.ones(1, jnp.float64))
    assert "f64" in str(probe)
    for program in programs:
        assert "f64" not in str(program) and "c128" not in str(program)


@every_row
def test_the_controls_expect_what_the_laws_say(row):
    nonzero = {"future": not row.causal, "order": row.sees_order, "shift": row.position == "sinusoidal", "padding": False}
    nonzero |= {"token_by_token": False} if row.causal else {}
    assert expected(observe(row).model) == {name: "nonzero" if yes else "zero" for name, yes in nonzero.items()}
