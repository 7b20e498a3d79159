"""Costs against counts by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqlab.measures.cost import count_flops, flops_per_token, parameters, state_bytes
from seqlab.mixers.attention import Attention
from seqlab.mixers.rnn import GRU, LSTM, Elman
from seqlab.mixers.ssm import LRU
from seqlab.mlp import MLP
from seqlab.model import SequenceModel

V, D, N, L = 13, 8, 6, 3


def build(mixer, width=D, depth=L, vocab_size=V, **settings):
    return SequenceModel(vocab_size, width=width, depth=depth, mixer=mixer, rngs=nnx.Rngs(0), **settings)


@pytest.mark.parametrize(
    ("mixer", "length", "by_hand"),
    [
        (partial(Elman, state_size=N), 100, 4 * N),
        (partial(GRU, state_size=N), 100, 4 * N),
        (partial(LSTM, state_size=N), 100, 4 * 2 * N),  # hidden and cell
        (partial(LRU, state_size=N), 100, 4 * 2 * N),  # real and imaginary part
        (partial(Attention, heads=2), 100, 4 * 2 * 100 * D + 4),  # keys, values and how many there are
        (partial(Attention, heads=2), 7, 4 * 2 * 7 * D + 4),
    ],
)
def test_the_state_of_a_sequence_in_bytes(mixer, length, by_hand):
    assert state_bytes(build(mixer), length) == L * by_hand


def test_every_number_that_is_trained_is_a_parameter():
    attention = 4 * (D * D + D)
    assert parameters(build(partial(Attention, heads=2))) == 2 * V * D + L * (D + attention) + D
    lru = 3 * N + 4 * D * N + D + 2 * (D * D + D)
    assert parameters(build(partial(LRU, state_size=N))) == 2 * V * D + L * (D + lru) + D


def test_a_bidirectional_model_carries_no_state():
    assert state_bytes(build(GRU, bidirectional=True), 10) is None
    assert state_bytes(build(partial(Attention, heads=2, causal=False)), 10) is None


A, B = jnp.ones((3, 4)), jnp.ones((4, 5))


def loop(f, length):
    return jax.lax.scan(lambda x, _: (f(x), None), A, length=length)[0]


PROGRAMS = {
    "a product of matrices": (lambda: A @ B, 2 * 3 * 4 * 5),
    "a batch of products": (lambda: jnp.einsum("bij,bjk->bik", jnp.stack([A] * 7), jnp.stack([B] * 7)), 7 * 120),
    "a contraction of two axes": (lambda: jnp.einsum("ijk,ijk->k", jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4))), 2 * 24),
    "one operation an element": (lambda: jnp.tanh(A + A), 24),
    "a sum over its inputs": (lambda: A.sum(0), 12),
    "what only moves": (lambda: jnp.concatenate([A.T, A.reshape(4, 3)])[::-1], 0),
    "whole numbers": (lambda: jnp.arange(5) * 3 + 1, 0),
    "a compiled function": (lambda: jax.jit(lambda x: x * x)(A), 12),
    "a recomputed function": (lambda: jax.checkpoint(lambda x: x * x)(A), 12),
    "a loop, times its length": (lambda: loop(lambda x: x @ jnp.ones((4, 4)), 9), 9 * 96),
    "a loop in a loop": (lambda: loop(lambda x: x * loop(jnp.exp, 5), 9), 9 * (5 * 12 + 12)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_counted_by_hand(name):
    program, by_hand = PROGRAMS[name]
    assert count_flops(jax.make_jaxpr(program)()) == by_hand


SPELLING = 0.1
"""Share by which elementwise operations may miss the count by hand: JAX and Flax may spell a norm otherwise."""


def norm(width):
    return 5 * width + 3  # square, sum, centre (by zero), two scalings; mean, epsilon, root


@pytest.mark.parametrize(("depth", "expansion", "scored"), [(1, 0, 64), (1, 4, 64), (3, 4, 5)])
def test_a_transformer_costs_its_matrices_and_its_scores(depth, expansion, scored):
    length, width, vocab, heads = 64, 32, 50, 4
    mixer = partial(Attention, heads=heads)
    mlp = partial(MLP, expansion=expansion) if expansion else None
    model = build(mixer, width=width, depth=depth, vocab_size=vocab, mlp=mlp)
    projections = 2 * length * (4 + 2 * expansion) * width**2
    scores = 2 * 2 * length**2 * width  # q k and a v, the future included
    products = depth * (projections + scores) + 2 * scored * width * vocab
    # a score: scaled, replaced, less the maximum (two), exponentiated, summed
    by_score = 6 * heads * length**2
    by_token = norm(width) + width + 4 * width + width  # over the sum, four biases, the residual
    if expansion:  # a bias and a gelu of eight; the other bias, the residual
        by_token += norm(width) + 9 * expansion * width + 2 * width
    elementwise = depth * (by_score + length * by_token) + length * norm(width)
    rest = length * flops_per_token(model, length, scored) - products
    assert rest == pytest.approx(elementwise, rel=SPELLING)


@pytest.mark.parametrize(
    ("mixer", "products", "elementwise"),
    [
        # bias, sum, tanh; the read-out's bias, the residual
        (Elman, lambda n, d: n * d + n * n + n * d, lambda n, d: 3 * n + 2 * d),
        # three biases, sums; two sigmoids, a tanh; b_n, r (...), (1 - z) n + z h
        (GRU, lambda n, d: 3 * (n * d + n * n) + n * d, lambda n, d: 15 * n + 2 * d),
        # four biases, sums; three sigmoids, two tanhs; f c + i g, o (...)
        (LSTM, lambda n, d: 4 * (n * d + n * n) + n * d, lambda n, d: 17 * n + 2 * d),
        # gamma, a complex product and sum; Re (C h) + d x, two biases, a silu, the gate, the residual
        (LRU, lambda n, d: 2 * n * d + 2 * n * d + 2 * d * d, lambda n, d: 10 * n + 9 * d),
    ],
)
def test_a_recurrence_costs_its_matrices_at_each_token(mixer, products, elementwise):
    size, width, length = 24, 16, 100
    model = build(partial(mixer, state_size=size), width=width)
    rest = flops_per_token(model, length, length) - L * 2 * products(size, width) - 2 * width * V
    by_hand = L * (elementwise(size, width) + norm(width)) + norm(width)
    assert rest == pytest.approx(by_hand, rel=SPELLING)


def test_only_scored_positions_pay_for_the_head():
    model = build(GRU)
    assert 10 * (flops_per_token(model, 10, 7) - flops_per_token(model, 10, 3)) == pytest.approx(4 * 2 * D * V)
