import re
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.tasks.text import read_text

# Every character occurs once, so that a token says where in the text it stands.
DISTINCT = "".join(chr(0x100 + i) for i in range(800))
WORDS = " ".join(f"w{i}" for i in range(400))
FIELDS = ("inputs", "scored", "targets", "weights")
KEY = jax.random.key(0)

draw = jax.jit(lambda task, key: task.sample(key, 64, "valid"))


@jax.jit
def plan(task, key, shuffled):
    # Two more windows than there are: they must weigh nothing.
    return task.window("test", jnp.arange(task.windows("test") + 2), key, shuffled)


def text_of(folder: Path, content: str, **settings):
    file = folder / "text.txt"
    file.write_bytes(content.encode())
    return read_text(path=str(file), **settings)


def numpy_batch(batch):
    return SimpleNamespace(**{name: np.array(getattr(batch, name)) for name in FIELDS})


@pytest.mark.parametrize(
    ("length", "objective"), [(16, "next"), (7, "next"), (2, "next"), (16, "masked"), (7, "masked")]
)
def test_every_character_of_a_split_is_scored_once_inside_the_split(tmp_path, length, objective):
    task = text_of(tmp_path, DISTINCT, length=length, objective=objective)
    batch, part = numpy_batch(plan(task, KEY, False)), np.arange(760, 800)
    mask = task.vocab.size - 1

    assert set(np.unique(batch.weights)) <= {0.0, 1.0}
    scored = np.sort(batch.targets[batch.weights == 1])
    np.testing.assert_array_equal(scored, part[1:] if objective == "next" else part)
    np.testing.assert_array_equal(batch.weights[-2:], 0)

    assert set(np.unique(batch.inputs)) <= {*part, mask}
    # Windows are contiguous: character t of a window that starts at s is s + t, for each that is not masked.
    start = np.max(np.where(batch.inputs == mask, -1, batch.inputs - np.arange(length)), axis=1, keepdims=True)
    np.testing.assert_array_equal(
        np.where(batch.inputs == mask, start + np.arange(length), batch.inputs), start + np.arange(length)
    )
    if objective == "next":
        np.testing.assert_array_equal(batch.targets, start + batch.scored + 1)
        assert ((batch.scored >= length // 2) | (start == part[0]))[batch.weights == 1].all()
    else:
        np.testing.assert_array_equal(batch.targets, start + batch.scored)
        np.testing.assert_array_equal((batch.inputs == mask).sum(1), task.masks)
        assert (np.take_along_axis(batch.inputs, batch.scored, 1) == mask).all()


def test_sampled_next_characters_follow_their_inputs_and_reach_both_ends_of_the_split(tmp_path):
    task = text_of(tmp_path, DISTINCT, length=30, objective="next")
    batch, part = numpy_batch(draw(task, KEY)), np.arange(720, 760)
    np.testing.assert_array_equal(batch.inputs, batch.inputs[:, :1] + np.arange(30))
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
    np.testing.assert_array_equal(batch.scored, np.tile(np.arange(30), (64, 1)))
    # 10 beginnings in 64 draws: one of the two ends is missed with probability below 2 * .9 ** 64 = .0024; fixed key.
    assert (batch.inputs.min(), batch.targets.max()) == (part[0], part[-1])


@pytest.mark.parametrize(("rate", "masks"), [(0.15, 4), (0.001, 1), (0.5, 15)])
def test_sampled_masks_are_exactly_as_many_as_the_rate_says(tmp_path, rate, masks):
    task = text_of(tmp_path, DISTINCT, length=30, objective="masked", mask_rate=rate)
    batch, mask = numpy_batch(draw(task, KEY)), len(DISTINCT)
    assert batch.scored.shape == (64, masks)
    np.testing.assert_array_equal((batch.inputs == mask).sum(1), masks)
    assert (np.take_along_axis(batch.inputs, batch.scored, 1) == mask).all()
    restored = batch.inputs.copy()
    np.put_along_axis(restored, batch.scored, batch.targets, 1)
    np.testing.assert_array_equal(restored, restored[:, :1] + np.arange(30))
    assert restored.min() >= 720 and restored.max() < 760
    assert len({tuple(sorted(row)) for row in batch.scored}) > 10  # rows are masked independently


def words_of(task, tokens):
    return re.findall(r"\S*\s*", task.vocab.decode(tokens))


def test_shuffling_the_older_context_keeps_words_whole_and_targets_untouched(tmp_path):
    task = text_of(tmp_path, WORDS, length=64, objective="next")
    plain, shuffled = numpy_batch(plan(task, KEY, False)), numpy_batch(plan(task, KEY, True))
    for field in ("scored", "targets", "weights"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(shuffled, field))
    np.testing.assert_array_equal(plain.inputs[:, 32:], shuffled.inputs[:, 32:])
    np.testing.assert_array_equal(plain.inputs[0], shuffled.inputs[0])  # it scores its own first half
    moved = 0
    for before, after in zip(plain.inputs[1:], shuffled.inputs[1:], strict=True):
        assert Counter(words_of(task, before)) == Counter(words_of(task, after))
        moved += (before != after).any()
    # About 4 words move freely, so 1 window in 24 keeps its order by chance; all but two of them do not.
    assert moved >= len(plain.inputs) - 3
    other = numpy_batch(plan(task, jax.random.key(1), True))
    assert (other.inputs != shuffled.inputs).any()


def test_masks_move_with_their_characters(tmp_path):
    task = text_of(tmp_path, WORDS, length=64, objective="masked")
    plain, shuffled = numpy_batch(plan(task, KEY, False)), numpy_batch(plan(task, KEY, True))
    np.testing.assert_array_equal(plain.targets, shuffled.targets)
    np.testing.assert_array_equal(plain.weights, shuffled.weights)
    assert (np.take_along_axis(shuffled.inputs, shuffled.scored, 1) == task.vocab.size - 1).all()
    for batch in (plain, shuffled):  # lift the masks
        np.put_along_axis(batch.inputs, batch.scored, batch.targets, 1)
    for before, after in zip(plain.inputs, shuffled.inputs, strict=True):
        assert Counter(words_of(task, before)) == Counter(words_of(task, after))
    assert (plain.inputs != shuffled.inputs).any(axis=1).all()


def test_words_come_in_every_order_equally_often(tmp_path):
    # The test split begins with the phrase, and window 1 with the split: the phrase is its older half.
    task = text_of(tmp_path, "xx a b c yy " * 400, length=24, objective="next")
    shuffle = jax.jit(jax.vmap(lambda key: task.window("test", jnp.array([1]), key, True).inputs[0, :12]))
    orders = Counter(task.vocab.decode(row) for row in np.asarray(shuffle(jax.random.split(KEY, 600))))
    assert set(orders) == {f"xx {' '.join(order)} yy " for order in permutations("abc")}
    # Each is binomial (600, 1/6): 100 +- 9.1; 5 sigma.
    assert all(abs(count - 100) < 46 for count in orders.values())


def test_the_alphabet_is_that_of_the_whole_text_and_every_character_survives(tmp_path):
    content = "naïve 漢字 😀\r\n" * 40
    task = text_of(tmp_path, content, length=8)
    assert task.vocab.words == (*sorted(set(content)), "<mask>")
    assert task.tokens.dtype == jnp.uint8
    assert task.vocab.decode(np.asarray(task.tokens)) == content
    assert int(task.utf8_bytes[task.tokens].sum()) == len(content.encode())


def test_known_readers_score_what_numpy_says(tmp_path):
    rng = np.random.default_rng(0)
    task = text_of(tmp_path, "".join(rng.choice(list("aaab é"), 2000)) + "z", length=8)
    x, size = np.asarray(task.tokens).astype(int), task.vocab.size - 1
    train, test = x[:1801], x[1901:]
    single, double = np.ones(size), np.ones((size, size))
    for i, t in enumerate(train):
        single[t] += 1
        if i:
            double[train[i - 1], t] += 1
    single, double = single / single.sum(), double / double.sum(1, keepdims=True)
    expected = {
        "uniform": np.log2(size),
        "unigram": np.mean([-np.log2(single[t]) for t in test[1:]]),
        "bigram": np.mean([-np.log2(double[s, t]) for s, t in pairwise(test)]),
    }
    assert task.ceilings() == pytest.approx(expected, rel=1e-12)  # float64 on both sides


def test_each_model_is_asked_what_it_cannot_see(tmp_path):
    task = text_of(tmp_path, DISTINCT, length=8)
    assert task.asked_of(causal=True).objective == "next"
    assert task.asked_of(causal=False).objective == "masked"
    assert task.replace(objective="masked").asked_of(causal=True).objective == "masked"
    with pytest.raises(ValueError, match=r"task\.objective=next .* its answer: use task\.objective=masked .*model="):
        task.replace(objective="next").asked_of(causal=False)
    with pytest.raises(ValueError, match="asked_of"):
        task.sample(KEY, 2, "train")


@pytest.mark.parametrize(
    ("content", "settings", "line"),
    [
        (b"", {}, r"text\.txt is empty"),
        (b"ab\xffcd", {}, r"text\.txt is not UTF-8 at byte 2"),
        (b"too short" * 10, {}, r"text\.txt is too short for task\.length=128: its test split holds 4 .* needs 129"),
        (b"long enough" * 50, {"length": 1}, r"task\.length=1: use"),
        (
            b"long enough" * 50,
            {"length": 8, "objective": "last"},
            r"task\.objective=last: use one of auto, next, masked",
        ),
        (b"long enough" * 50, {"length": 8, "mask_rate": 1.5}, r"task\.mask_rate=1\.5: use a share"),
        (b"long enough" * 50, {"length": 8, "held_out": 1.0}, r"task\.held_out=1\.0: use a share"),
    ],
)
def test_bad_input_gets_one_line_that_names_it(tmp_path, content, settings, line):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=line) as caught:
        read_text(path=str(file), **settings)
    assert "\n" not in str(caught.value)


def test_missing_places_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt does not exist: name a UTF-8 text file"):
        read_text(path=str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match="is a directory"):
        read_text(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"task\.corpus=kjv is unknown: use asv or python_docs, or task\.path=FILE"):
        read_text(corpus="kjv")


def test_a_shorter_length_must_fit_as_well(tmp_path):
    task = text_of(tmp_path, DISTINCT, length=8)
    with pytest.raises(ValueError, match=r"too short for task\.length=40"):
        task.replace(length=40)


def test_the_bible_is_all_there():
    task = read_text(corpus="asv")
    text = task.vocab.decode(np.asarray(task.tokens))
    assert text.startswith("In the beginning God created the heavens and the earth.\nAnd the earth was waste and void;")
    assert text.endswith("The grace of the Lord Jesus be with the saints. Amen.")
    assert len(text) > 4_000_000
    assert task.ceilings()["bigram"] < task.ceilings()["unigram"] < task.ceilings()["uniform"] < 7


def test_the_python_docs_load():
    task = read_text(corpus="python_docs")
    text = task.vocab.decode(np.asarray(task.tokens))
    assert len(text) > 300_000 and "assert" in text[:100]
