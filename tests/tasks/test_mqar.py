"""MQAR against a numpy solver, exact enumeration and the formulas of its definition."""

import re
from functools import partial
from itertools import permutations, product
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from scipy import stats

from seqlab.tasks.mqar import BLANK, MQAR

SETTINGS = list(product(("power", "distance"), ("blank", "random")))


@partial(jax.jit, static_argnames=("rows", "split"))
def sample(task, key, rows=2000, split="train"):
    return task.sample(key, rows, split)


def draw(task, rows=2000, seed=0, split="train"):
    """The inputs, scored positions, targets and labels of a batch, in numpy."""
    batch = sample(task, jax.random.key(seed), rows, split)
    assert (np.asarray(batch.weights) == 1).all()
    return jax.tree.map(np.asarray, (batch.inputs, batch.scored, batch.targets, batch.labels))


@pytest.mark.parametrize(("slots", "filler"), SETTINGS)
def test_a_reader_of_the_pairs_answers_every_query(slots, filler):
    task = MQAR(length=48, pairs=6, vocab_size=42, slots=slots, filler=filler)
    inputs, scored, targets, labels = draw(task, rows=2500)  # four settings: 10,000 sequences
    assert inputs.shape == (2500, 48) and scored.shape == targets.shape == (2500, 6)
    for row, places, answers, gaps, pairs in zip(inputs, scored, targets, labels["gap"], labels["pair"], strict=True):
        memory = dict(zip(row[:12:2], row[1:12:2], strict=True))
        assert len(memory) == 6, "keys repeat"
        assert [memory[row[place]] for place in places] == list(answers)
        assert len(set(places)) == 6 and (places >= 12).all() and (places % 2 == 0).all()
        source = 2 * pairs + 1
        assert (row[source] == answers).all() and (places - source == gaps).all()
        # each pair is asked exactly once, and nothing else ever looks like a query
        others = np.delete(row[12:], places - 12)
        assert not np.isin(others, list(memory)).any()
        assert (others == BLANK).all() if filler == "blank" else (others != BLANK).all()
    keys, values = inputs[:, :12:2], inputs[:, 1:12:2]
    # 15,000 draws miss one of about 20 tokens with probability 20 (19/20)^15000 < 1e-300
    assert set(keys.ravel()) == set(range(1, 21)) and set(values.ravel()) == set(range(21, 42))


def test_random_fillers_are_uniform_over_what_is_no_live_key():
    task = MQAR(length=40, pairs=2, vocab_size=9, filler="random")
    inputs, scored, _, _ = draw(task, rows=4000)
    fills = [np.delete(row[4:], places - 4) for row, places in zip(inputs, scored, strict=True)]
    for first, second in product(range(1, 5), repeat=2):
        rows = [fill for fill, row in zip(fills, inputs, strict=True) if row[0] == first and row[2] == second]
        counts = np.bincount(np.concatenate(rows), minlength=9) if rows else np.zeros(9)
        allowed = sorted(set(range(1, 9)) - {first, second}) if first != second else []
        assert counts.sum() == counts[allowed].sum()
        # one fixed seed; a correct sampler fails a level of 1e-4 in one of the 12 cases with probability 1.2e-3
        assert not allowed or stats.chisquare(counts[allowed]).pvalue > 1e-4


def test_values_collide_as_independent_draws_do():
    task = MQAR(length=32, pairs=8, vocab_size=129)
    rows = 4000
    values = draw(task, rows)[0][:, 1:16:2]
    distinct = sum(len(set(row)) == 8 for row in values)
    chance = np.prod(1 - np.arange(8) / 64)  # the birthday problem: .64, against 1 without replacement
    low, high = stats.binom.interval(1 - 1e-4, rows, chance)
    assert low <= distinct <= high


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_the_first_pair_draws_its_slot_by_the_power_law(power):
    # slots are drawn in the order of the pairs, so that the first one's follows p(x) itself
    task = MQAR(length=32, pairs=4, power=power)
    _, scored, _, _ = draw(task, rows=8000)
    slot = (scored[:, 0] - 8) // 2
    p = power * np.arange(1.0, 13) ** (power - 1)
    assert stats.chisquare(np.bincount(slot, minlength=12), 8000 * p / p.sum()).pvalue > 1e-4  # level: false alarms


def test_all_slots_together_are_drawn_without_replacement():
    task = MQAR(length=16, pairs=3, power=0.3)
    _, scored, _, _ = draw(task, rows=8000)
    slots = [tuple(row) for row in (scored - 6) // 2]
    p = 0.3 * np.arange(1.0, 6) ** -0.7
    p /= p.sum()
    orders = list(permutations(range(5), 3))
    expected = [p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b]) for a, b, c in orders]
    counts = [slots.count(order) for order in orders]
    assert stats.chisquare(counts, 8000 * np.array(expected)).pvalue > 1e-4


def distance_rule(pairs, slots):
    """Probability of every assignment (the slot of pair 0, of pair 1, ...), by the rule as it reads."""

    def extend(chosen, probability):
        if len(chosen) == pairs:
            assignment = tuple(chosen[pair] for pair in range(pairs))
            total[assignment] = total.get(assignment, 0) + probability
            return
        by_distance = {}
        for pair, slot in product(set(range(pairs)) - set(chosen), set(range(slots)) - set(chosen.values())):
            by_distance.setdefault((2 * pairs + 2 * slot) - (2 * pair + 1), []).append((pair, slot))
        for combinations in by_distance.values():
            for pair, slot in combinations:
                extend({**chosen, pair: slot}, probability / len(by_distance) / len(combinations))

    total = {}
    extend({}, 1.0)
    return total


# one pair: the first draw alone, uniform over the gaps 1, 3, ... 17
@pytest.mark.parametrize(("pairs", "length"), [(1, 20), (2, 10), (3, 16)])
def test_distances_follow_the_rule_exactly(pairs, length):
    task = MQAR(length=length, pairs=pairs, slots="distance")
    expected = distance_rule(pairs, task.slot_count)
    assert sum(expected.values()) == pytest.approx(1)
    assert pairs > 1 or set(expected.values()) == {1 / 9}
    _, scored, _, _ = draw(task, rows=8000)
    drawn = [tuple(row) for row in (scored - 2 * pairs) // 2]
    assert set(drawn) <= set(expected)
    counts = [drawn.count(assignment) for assignment in expected]
    assert stats.chisquare(counts, [8000 * p for p in expected.values()]).pvalue > 1e-4


def test_a_key_is_a_batch_and_the_splits_share_none():
    task = MQAR(length=16, pairs=4)
    splits = {split: draw(task, rows=32, split=split)[0] for split in ("train", "valid", "test")}
    assert (splits["train"] == draw(task, rows=32)[0]).all()
    assert (splits["train"] != draw(task, rows=32, seed=1)[0]).any()
    rows = {tuple(row) for inputs in splits.values() for row in inputs}
    assert len(rows) == 3 * 32


def test_the_original_settings_fit():
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        task = MQAR(vocab_size=8192).replace(length=length, pairs=pairs)
        assert (task.key_count, task.value_count) == (4095, 4096)
        assert task.vocab.size == 8192


def test_ceilings():
    task = MQAR(length=32, pairs=8)
    ceilings = task.ceilings()
    assert ceilings == {"chance": 1 / 64, "in_context_guess": 1 / 8 + 7 / 8 / 64, "oracle": 1.0}
    inputs, _, targets, _ = draw(task, rows=4000)
    guesses = inputs[:, 1:16:2][np.arange(4000), np.random.default_rng(0).integers(8, size=4000)]
    right = (guesses == targets[:, 3]).sum()
    low, high = stats.binom.interval(1 - 1e-4, 4000, ceilings["in_context_guess"])
    assert low <= right <= high


def test_the_configuration_is_the_default():
    config = yaml.safe_load(Path("conf/task/mqar.yaml").read_text())
    assert config.pop("_target_") == "seqlab.tasks.mqar.MQAR" and config.pop("defaults")
    task = MQAR(**config)
    assert task == MQAR() and hash(jax.tree.structure(task)) == hash(jax.tree.structure(MQAR()))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"length": 63}, "63 is odd; use 64"),
        ({"pairs": 20}, "20 do not fit task.length 64; use at most 16 pairs, or length 80"),
        ({"pairs": 0}, "task.pairs: 0 must be a positive"),
        ({"vocab_size": 9}, "has 4; use at most 4 pairs, or vocab_size 17"),
        ({"vocab_size": 1}, "has 0; use vocab_size 17"),
        ({"length": 2}, "do not fit task.length 2; use length 32"),
        ({"slots": "near"}, "task.slots=near is unknown; use power or distance"),
        ({"filler": "noise"}, "task.filler=noise is unknown; use blank or random"),
        ({"power": 0.0}, "task.power=0.0 must be positive"),
        ({"eval_lengths": [64, 16]}, "do not fit task.eval_lengths 16"),
        ({"eval_pairs": [8, 32]}, "task.eval_pairs: 32 do not fit task.length 64"),
    ],
)
def test_what_does_not_fit_is_one_line(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        MQAR(**settings)
    assert "\n" not in str(error.value)
