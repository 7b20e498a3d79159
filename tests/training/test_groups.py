"""Members trained a group at a time, batches in parts, blocks computed again: less memory, the same numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.mixers.attention import Attention
from seqlab.mixers.rnn import GRU
from seqlab.mlp import MLP
from seqlab.model import SequenceModel
from seqlab.training import program as program_module
from seqlab.training.memory import bytes_needed
from seqlab.training.mesh import Layout
from seqlab.training.optimizer import AdamW
from seqlab.training.program import Program
from seqlab.types import Curve

STEPS = 4


def trained(program, task, seeds):
    states = program.init(np.array(seeds), np.full(len(seeds), 0.01))
    states, metrics = program.advance(states, task, jnp.int32(STEPS))
    return states, jax.device_get(metrics)


def member(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.fixture(scope="module")
def pairs(program, task):
    """Four members, two at a time: members 0 and 2, then 1 and 3."""
    return trained(replace(program, max_parallel=2), task, [3, 5, 7, 9])


@pytest.mark.parametrize("group", [(0, 2), (1, 3)])
def test_a_group_is_what_it_would_be_as_the_whole_population_to_the_bit(program, task, pairs, differences, group):
    states, metrics = trained(program, task, [(3, 5, 7, 9)[i] for i in group])
    for place, index in enumerate(group):
        assert not differences(member(states, place), member(pairs[0], index))
        assert not differences(member(metrics, place), member(pairs[1], index))


def test_a_member_does_not_depend_on_who_else_is_in_the_population_by_a_bit(program, task, pairs, differences):
    others, _ = trained(replace(program, max_parallel=2), task, [3, 11, 13, 9])
    for index in (0, 3):
        assert not differences(member(others, index), member(pairs[0], index))
    for index in (1, 2):
        assert differences(member(others.params, index), member(pairs[0].params, index))


def test_one_after_another_is_each_alone_to_the_bit(program, task, differences):
    states, _ = trained(replace(program, max_parallel=1), task, [3, 5])
    for index, seed in enumerate([3, 5]):
        alone, _ = trained(program, task, [seed])
        assert not differences(member(alone, 0), member(states, index))


def test_groups_are_looked_at_in_the_order_of_the_members(program, task, pairs):
    def measure(model, task, key):
        batch = task.sample(key, 4, "test")
        return {"logits": Curve(model.predict(batch.inputs, batch.scored)[:, 0], (("row", (0, 1, 2, 3)),))}

    measure.task_type = type(task)

    def look(program):
        scores = program.evaluate(pairs[0], task, jax.random.key(1), 2, "valid")
        (curve,) = program.measure(measure, pairs[0], task, jax.random.key(2)).values()
        return scores["loss"], curve.values

    grouped, whole = look(replace(program, max_parallel=2)), look(program)
    assert np.unique(np.asarray(whole[0])).size == 4
    for ours, theirs in zip(grouped, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)  # another compilation of sums of order 1


@pytest.mark.parametrize(
    ("members", "most", "devices", "width"),
    [(12, None, 1, 12), (12, 12, 1, 12), (12, 5, 1, 4), (12, 1, 1, 1), (7, 6, 1, 1), (12, 6, 2, 6), (12, 5, 4, 4)],
)
def test_the_width_is_the_largest_divisor_that_is_allowed(program, members, most, devices, width):
    layout = Layout(population=devices)
    assert replace(program, max_parallel=most, layout=layout).width(members) == width


def test_a_width_below_the_devices_is_refused(program):
    with pytest.raises(ValueError, match=r"max_parallel=2 leaves nothing .* use at least 4"):
        replace(program, max_parallel=2, layout=Layout(population=4)).width(12)


def test_a_cpu_trains_one_member_at_a_time(program, task):
    states = jax.eval_shape(program.init, np.array([3, 5]), np.full(2, 0.01))
    assert program.compiled(states, task)[0] == replace(program, max_parallel=1)
    assert replace(program, max_parallel=2).compiled(states, task)[0].max_parallel == 2


def test_the_widest_group_that_fits_is_compiled_once_and_is_the_one_that_is_trained(
    program, task, pairs, differences, monkeypatch
):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def fits(compiled, most):
        asked.append(bytes_needed(compiled))
        return len(asked) >= most

    states = program.init(np.array([3, 5, 7, 9]), np.full(4, 0.01))
    monkeypatch.setattr(program_module, "fits", partial(fits, most=1))
    whole, _ = program.compiled(states, task)
    assert (whole, len(asked)) == (program, 1)

    asked.clear()
    monkeypatch.setattr(program_module, "fits", partial(fits, most=2))
    halved, advance = program.compiled(states, task)
    assert halved == replace(program, max_parallel=2)
    assert asked[1] < asked[0]
    assert not differences(advance(states, task, jnp.int32(STEPS))[0], pairs[0])

    asked.clear()
    monkeypatch.setattr(program_module, "fits", partial(fits, most=99))
    states = program.init(np.array([3, 5, 7, 9]), np.full(4, 0.01))
    assert program.compiled(states, task)[0].max_parallel == 1  # what cannot be halved is tried
    assert replace(program, max_parallel=4).compiled(states, task)[0].max_parallel == 4  # what was asked for is obeyed


@pytest.fixture(scope="module")
def plain(task):
    """Without dropout, whose masks depend on the parts."""
    build = partial(SequenceModel, 17, width=8, depth=2, mixer=GRU)
    return Program(build, AdamW(1e-2), steps=8, batch_size=8)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(plain, task, parts):
    """Also where its examples weigh differently."""
    params = member(plain.init(np.array([3]), np.array([0.01])).params, 0)
    batch = task.sample(jax.random.key(0), 8, "train")
    batch = batch.replace(weights=jax.random.uniform(jax.random.key(1), batch.weights.shape))
    key = jax.random.key(2)
    (expected, whole), (found, parted) = (
        jax.jit(lambda params, p=p: p.gradient(params, task, batch, key))(params)
        for p in (plain, replace(plain, accumulation=parts))
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # sums of 8 x 16 products in another order: 128 ** 0.5 roundings of 2^-24 of what they add up from
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs).max() + 1e-9)
    np.testing.assert_allclose(parted["loss"], whole["loss"], rtol=1e-6)


def test_parts_must_be_equal(plain):
    with pytest.raises(ValueError, match=r"train.accumulation=3 does not divide train.batch_size=8; .*1, 2, 4, 8"):
        replace(plain, accumulation=3)


@pytest.mark.slow
def test_a_batch_in_parts_and_blocks_computed_again_need_less_memory_for_the_same_loss(task):
    build = partial(
        SequenceModel, 17, width=16, depth=6, mixer=partial(Attention, heads=2), mlp=MLP, residual_scaling=True
    )
    plain = Program(build, AdamW(1e-2), steps=8, batch_size=32)
    again = Program(partial(build, rematerialize=True), AdamW(1e-2), steps=8, batch_size=32)
    found = []
    for program in (plain, again, replace(plain, accumulation=4)):
        states = program.init(np.array([3]), np.array([0.01]))
        _, advance = program.compiled(states, task)
        found.append((advance.memory_analysis().temp_size_in_bytes, advance(states, task, jnp.int32(3))[1]["loss"]))
    (memory, loss), *others = found
    for less, same in others:
        assert less < 0.6 * memory
        np.testing.assert_allclose(same, loss, rtol=1e-5)  # three steps of roundings of 2^-24
