"""Recall of readers of known ability."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from seqlab.measures.recall import Recall, powers_of_two
from seqlab.tasks.mqar import MQAR

MEASURE = Recall(batches=4, batch_size=128)
# counts are exact, their ratio is not: XLA may multiply by a rounded reciprocal, two roundings of at most 2^-24 each
ROUNDING = 2**-23


class Reader:
    """Recalls the value behind the latest earlier occurrence of the key at most `reach` back; else answers blank."""

    def __init__(self, vocab_size, reach):
        self.vocab_size, self.reach = vocab_size, reach

    def predict(self, tokens, scored, segments=None, key=None):
        asked = jnp.take_along_axis(tokens, scored, axis=1)
        gap = scored[:, :, None] - (jnp.arange(tokens.shape[1])[None, None] + 1)
        match = (tokens[:, None, :] == asked[:, :, None]) & (gap > 0) & (gap <= self.reach)
        source = tokens.shape[1] - 1 - jnp.argmax(match[:, :, ::-1], axis=-1)
        value = jnp.take_along_axis(tokens, jnp.minimum(source + 1, tokens.shape[1] - 1), axis=1)
        return jax.nn.one_hot(jnp.where(match.any(-1), value, 0), self.vocab_size)


class FirstValue:
    """Answers everything with the first value: right once a row, and where values coincide."""

    def predict(self, tokens, scored, segments=None, key=None):
        return jax.nn.one_hot(jnp.broadcast_to(tokens[:, 1:2], scored.shape), 129)


def measure(model, task, seed=0):
    return jax.jit(lambda task, key: MEASURE(model, task, key))(task, jax.random.key(seed))


def test_an_oracle_recalls_everything():
    task = MQAR(length=16, pairs=4, filler="random", eval_lengths=(32,))
    results = measure(Reader(129, reach=32), task)
    assert results["accuracy"].axes == ()
    assert results["recall_by_pairs"].axes == (("pairs", (1, 2, 4)),)
    assert results["recall_by_gap"].axes == (("gap", (1, 2, 4, 8)),)
    assert results["recall_by_length"].axes == (("length", (32,)),)
    for curve in results.values():
        np.testing.assert_allclose(curve.values, 1, rtol=ROUNDING)


def test_a_reader_with_a_short_reach_falls_off_where_its_reach_ends():
    # reach 10 (odd gaps 1 .. 9): all of the bins 1, 2, 4; of bin 8 (9, 11, 13, 15) a part; none of bin 16
    results = measure(Reader(129, reach=10), MQAR(length=32, pairs=4, eval_pairs=(4,)))
    by_gap = results["recall_by_gap"].values
    np.testing.assert_allclose(by_gap[:3], 1, rtol=ROUNDING)
    # seen: distances are near uniform, so that about one query in four of bin 8 has gap 9
    assert 0.15 < by_gap[3] < 0.4
    assert by_gap[4] == 0


def test_guessing_falls_with_the_load_as_one_over_n():
    task = MQAR(length=64, pairs=8, eval_pairs=(1, 4))
    results = measure(FirstValue(), task)
    assert results["recall_by_pairs"].axes == (("pairs", (1, 4, 8)),)  # the load trained at is always there
    rows = MEASURE.batches * MEASURE.batch_size
    np.testing.assert_allclose(results["recall_by_pairs"].values[0], 1, rtol=ROUNDING)
    for load, accuracy in zip((1, 4, 8), results["recall_by_pairs"].values, strict=True):
        # pair 0 is right once a row; each other one where its value coincides, which are independent draws of 1/64
        low, high = stats.binom.interval(1 - 1e-4, rows * (load - 1), 1 / 64) if load > 1 else (0, 0)
        assert rows + low - 0.5 <= rows * load * float(accuracy) <= rows + high + 0.5
    assert results["accuracy"].values == results["recall_by_pairs"].values[2]


def test_it_maps_over_members():
    task = MQAR(length=16, pairs=2, eval_pairs=(2,))
    reach = jnp.array([0, 16])
    by_member = jax.jit(jax.vmap(lambda reach: MEASURE(Reader(129, reach), task, jax.random.key(0))))(reach)
    np.testing.assert_allclose(by_member["accuracy"].values, [0, 1], rtol=ROUNDING)
    np.testing.assert_allclose(by_member["recall_by_gap"].values, [[0] * 4, [1] * 4], rtol=ROUNDING)


def test_powers_of_two_up_to_a_limit():
    assert [powers_of_two(limit) for limit in (1, 2, 7, 8)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)]
