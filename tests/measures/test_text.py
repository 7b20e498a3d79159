from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.measures.text import BitsPerByte
from seqlab.tasks.text import Text, read_text

KEY = jax.random.key(0)


def text_of(folder, content: str, **settings) -> Text:
    file = folder / "text.txt"
    file.write_bytes(content.encode())
    return read_text(path=str(file), **settings)


def measured(model, task, batch_size=5) -> dict[str, float]:
    curves = jax.jit(lambda task, key: BitsPerByte(batch_size)(model, task, key))(task, KEY)
    assert all(curve.axes == () and curve.values.shape == () for curve in curves.values())
    return {name: float(curve.values) for name, curve in curves.items()}


@dataclass
class Unigram:
    """The same prediction everywhere."""

    probabilities: np.ndarray

    def predict(self, tokens, scored, segments=None):
        logits = jnp.log(jnp.asarray(self.probabilities, jnp.float32))
        return jnp.broadcast_to(logits, (*scored.shape, len(logits)))


@dataclass
class Cycle:
    """Knows that the text repeats the alphabet: what comes `ahead` of a scored position follows from any character."""

    period: int
    ahead: int

    def predict(self, tokens, scored, segments=None):
        known = jnp.argmax(tokens < self.period, axis=1, keepdims=True)
        answer = jnp.take_along_axis(tokens, known, axis=1) - known + scored + self.ahead
        return 200.0 * jax.nn.one_hot(answer % self.period, self.period + 1)


@dataclass
class Bag:
    """Predicts the characters of its window by their number, whatever their order."""

    size: int

    def predict(self, tokens, scored, segments=None):
        counts = jax.nn.one_hot(tokens, self.size).sum(axis=1)
        return jnp.broadcast_to(jnp.log(counts + 1)[:, None], (*scored.shape, self.size))


@dataclass
class Previous:
    """Expects the character that stands `back` before the scored position."""

    size: int
    back: int

    def predict(self, tokens, scored, segments=None):
        seen = jnp.take_along_axis(tokens, jnp.maximum(scored - self.back, 0), axis=1)
        return jax.nn.one_hot(seen, self.size)


@pytest.mark.parametrize("objective", ["next", "masked"])
@pytest.mark.parametrize("length", [16, 9])
def test_a_unigram_reader_costs_what_numpy_says(tmp_path, objective, length):
    rng = np.random.default_rng(1)
    content = "".join(rng.choice(list("ab é漢😀"), 2100))
    task = text_of(tmp_path, content, length=length, objective=objective)
    p = rng.dirichlet(np.ones(task.vocab.size))
    test = content[1995:] if objective == "masked" else content[1996:]  # nothing precedes the first character
    bits = sum(-np.log2(p[task.vocab.words.index(character)]) for character in test)
    result = measured(Unigram(p), task)
    # float32 log-probabilities, averaged: relative error of a few 2^-24
    assert result["bits_per_character"] == pytest.approx(bits / len(test), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(bits / len(test.encode()), rel=1e-5)
    assert result["bits_per_byte_shuffled_words"] == result["bits_per_byte"]  # it reads nothing


@pytest.mark.parametrize(("objective", "ahead"), [("next", 1), ("masked", 0)])
def test_a_reader_that_knows_the_text_costs_nothing(tmp_path, objective, ahead):
    task = text_of(tmp_path, "abcdefghij" * 100, length=16, objective=objective)
    # exp(-200) is 0 in float32, so log-softmax of the right answer is exactly 0.
    assert measured(Cycle(period=10, ahead=ahead), task)["bits_per_byte"] == 0


@pytest.mark.parametrize("objective", ["next", "masked"])
def test_an_order_blind_reader_does_not_see_the_shuffle(tmp_path, objective):
    rng = np.random.default_rng(2)
    task = text_of(
        tmp_path, " ".join(rng.choice(["the", "dog", "bites", "a", "man"], 600)), length=64, objective=objective
    )
    result = measured(Bag(task.vocab.size), task)
    # Counts are whole numbers, and each target keeps its place in the sum: equal to the last bit.
    assert result["bits_per_byte_shuffled_words"] == result["bits_per_byte"]


def test_shuffling_reaches_the_context_older_than_half_a_window_and_no_other(tmp_path):
    rng = np.random.default_rng(3)
    task = text_of(
        tmp_path, " ".join(rng.choice(["the", "dog", "bites", "a", "man"], 1200)), length=64, objective="next"
    )
    old, recent = measured(Previous(task.vocab.size, 40), task), measured(Previous(task.vocab.size, 0), task)
    assert recent["bits_per_byte_shuffled_words"] == recent["bits_per_byte"]
    assert old["bits_per_byte_shuffled_words"] != old["bits_per_byte"]


def test_the_batch_size_does_not_matter(tmp_path):
    rng = np.random.default_rng(4)
    task = text_of(tmp_path, "".join(rng.choice(list("ab cd"), 2000)), length=16, objective="next")
    model = Bag(task.vocab.size)
    # float32 sums in another order
    assert measured(model, task, batch_size=3) == pytest.approx(measured(model, task, batch_size=50), rel=1e-6)
