"""Role accuracy of readers of known ability."""

import jax
import jax.numpy as jnp
import numpy as np

from seqlab.measures.roles import RoleAccuracy
from seqlab.tasks.roles import VOICES, Roles

TASK = Roles()
VOCAB = TASK.vocab.words
MEASURE = RoleAccuracy(batches=2, batch_size=64)


def is_one_of(tokens, words):
    return jnp.isin(tokens, jnp.array([VOCAB.index(word) for word in words]))


class OrderBlind:
    """Any function of the sorted words: here the noun whose id comes first."""

    def predict(self, tokens, scored, segments=None, key=None):
        tokens = jnp.sort(tokens, axis=1)
        first = jnp.argmax(is_one_of(tokens, TASK.nouns), axis=1)
        noun = jnp.take_along_axis(tokens, first[:, None], axis=1)
        return jax.nn.one_hot(noun, len(VOCAB))


class Grammarian:
    """Knows the word order, and the passive only if told to."""

    def __init__(self, knows_passive):
        self.knows_passive = knows_passive

    def predict(self, tokens, scored, segments=None, key=None):
        nouns = is_one_of(tokens, TASK.nouns)
        first, second = jnp.argmax(nouns, axis=1), tokens.shape[1] - 1 - jnp.argmax(nouns[:, ::-1], axis=1)
        passive = is_one_of(tokens, ["was"]).any(1) & self.knows_passive
        wants_second = is_one_of(tokens[:, -1], ["patient"]) ^ passive
        place = jnp.where(wants_second, second, first)
        return jax.nn.one_hot(jnp.take_along_axis(tokens, place[:, None], axis=1), len(VOCAB))


def measure(model):
    return jax.jit(lambda key: MEASURE(model, TASK, key))(jax.random.key(0))


def test_an_order_blind_reader_gets_half_and_never_both():
    results = measure(OrderBlind())
    assert results["accuracy"].values == TASK.ceilings()["bag_of_words"] == 0.5
    assert results["both_correct"].values == TASK.ceilings()["both_correct/bag_of_words"] == 0
    np.testing.assert_array_equal(results["role_accuracy_by_voice"].values, [0.5, 0.5])


def test_a_grammarian_gets_all():
    results = measure(Grammarian(knows_passive=True))
    for curve in results.values():
        np.testing.assert_array_equal(curve.values, 1)
    assert results["accuracy"].axes == results["both_correct"].axes == ()
    assert results["role_accuracy_by_voice"].axes == (("voice", VOICES),)


def test_it_shows_who_reads_the_active_only():
    results = measure(Grammarian(knows_passive=False))
    np.testing.assert_array_equal(results["role_accuracy_by_voice"].values, [1, 0])
    assert 0 < results["accuracy"].values == results["both_correct"].values < 1
