"""A population is nothing but its members, a chunk nothing but its steps, and a member that diverges stands still."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from seqlab.mixers.base import Recurrence
from seqlab.training.program import ALIVE
from seqlab.types import Curve

STEPS = 6


def trained(program, task, seeds, rates, chunks=(STEPS,)):
    """The states after all chunks, and the metrics of each."""
    states, metrics = program.init(np.array(seeds), np.array(rates)), []
    for steps in chunks:
        states, means = program.advance(states, task, jnp.int32(steps))
        metrics.append(jax.device_get(means))
    return states, metrics


def member(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@pytest.fixture(scope="module")
def pair(program, task):
    return trained(program, task, [3, 5], [0.01, 0.01])


def test_a_member_is_what_it_is_alone(program, task, pair):
    for index, seed in enumerate([3, 5]):
        states, (metrics,) = trained(program, task, [seed], [0.01])
        # Two compilations of one sum differ by roundings of 2^-24, which 6 steps multiply by about 10.
        np.testing.assert_allclose(metrics["loss"][0], pair[1][0]["loss"][index], rtol=1e-5)
        np.testing.assert_array_equal(jax.random.key_data(states.key[0]), jax.random.key_data(pair[0].key[index]))
        # Adam divides a gradient by its own size: one that is rounding alone moves its parameter by up to the learning
        # rate. Few are, so the parameters as a whole differ by far less than the 1e-2 that one step moves them.
        ours, theirs = (
            jnp.concatenate([x.ravel() for x in jax.tree.leaves(member(s.params, i))])
            for s, i in ((states, 0), (pair[0], index))
        )
        assert jnp.linalg.norm(ours - theirs) < 1e-4 * jnp.linalg.norm(theirs)


def test_a_member_does_not_depend_on_its_neighbour_by_a_bit(program, task, pair, differences):
    others, _ = trained(program, task, [3, 9], [0.01, 0.3])
    assert not differences(member(others, 0), member(pair[0], 0))
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(others.params), jax.tree.leaves(pair[0].params), strict=True)
    )


@pytest.mark.parametrize("chunks", [(3, 3), (1, 5)])
def test_chunks_make_no_difference_by_a_bit(program, task, pair, differences, chunks):
    states, _ = trained(program, task, [3, 5], [0.01, 0.01], chunks)
    assert not differences(states, pair[0])


def test_a_chunk_reports_the_mean_of_its_steps(program, task, pair):
    _, each = trained(program, task, [3, 5], [0.01, 0.01], (1,) * STEPS)
    for name, mean in pair[1][0].items():
        # a mean of 6 numbers in another order
        np.testing.assert_allclose(mean, np.mean([metrics[name] for metrics in each], axis=0), rtol=1e-6)


def test_members_start_apart_by_their_seed_alone(program, differences):
    states = program.init(np.array([3, 3, 4]), np.array([0.01, 0.3, 0.01]))
    assert not differences(member(states.params, 0), member(states.params, 1))
    assert not np.array_equal(jax.random.key_data(states.key[0]), jax.random.key_data(states.key[2]))
    drawn = {path: x for path, x in nnx.to_flat_state(states.params) if np.unique(np.asarray(x[...])).size > 2}
    assert drawn
    for path, x in drawn.items():
        assert (x[0] != x[2]).mean() > 0.99, path
    np.testing.assert_array_equal(states.step, 0)
    np.testing.assert_array_equal(states.diverged_at, ALIVE)


def test_a_learning_rate_of_zero_trains_nothing_and_a_tenfold_one_moves_ten_times_as_far(program, task):
    def distances(rates):
        start = program.init(np.array([3, 3]), np.array(rates)).params
        end, _ = trained(program, task, [3, 3], rates, (2,))
        moved = [b - a for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(end.params), strict=True)]
        return [np.sqrt(sum((x[i] ** 2).sum() for x in moved)) for i in range(2)]

    zero, small = distances([0.0, 1e-6])
    same, tenfold = distances([1e-6, 1e-5])
    assert zero == 0.0
    assert small == same
    # parameters of order 1 round a move of 1e-6 to 6e-8, some percent of it, up or down alike
    np.testing.assert_allclose(tenfold / small, 10, rtol=0.02)


def test_members_draw_their_own_training_data_and_share_what_they_are_judged_by(program, task):
    states = program.init(np.array([3, 5]), np.array([0.0, 0.0]))
    states = states.replace(params=jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), states.params))
    judged = program.evaluate(states, task, jax.random.key(0), 2, "valid")
    assert judged["loss"][0] == judged["loss"][1]
    _, metrics = program.advance(states, task, jnp.int32(1))
    assert metrics["loss"][0] != metrics["loss"][1]


def test_every_step_draws_new_data(program, task):
    _, metrics = trained(program, task, [3, 5], [0.0, 0.0], (1,) * 4)  # the same parameters throughout
    for index in range(2):
        assert len({step["loss"][index].item() for step in metrics}) == 4


def test_evaluation_is_the_mean_loss_of_its_batches_without_dropout(program, task, pair):
    found = program.evaluate(pair[0], task, jax.random.key(1), 2, "valid")
    losses = []
    for key in jax.random.split(jax.random.key(1), 2):
        batch = task.sample(key, program.batch_size, "valid")
        losses.append([numpy_loss(program.model(member(pair[0].params, i))(batch.inputs), batch) for i in range(2)])
    np.testing.assert_allclose(found["loss"], np.mean(losses, axis=0), rtol=1e-5)  # float32 against float64


def test_dropout_is_on_in_training_alone(program, task, pair):
    params, batch = member(pair[0].params, 0), task.sample(jax.random.key(0), 4, "train")
    plain, one, other = (
        program.score(params, task, batch, key)[0] for key in (None, jax.random.key(1), jax.random.key(2))
    )
    assert len({float(plain), float(one), float(other)}) == 3


@pytest.mark.parametrize(("rate", "step"), [(1e30, 1), (np.inf, 0)])
def test_a_member_that_diverges_stands_still_and_its_neighbour_does_not_notice(
    program, task, pair, differences, rate, step
):
    """The warm-up's step 0 has the rate 0, which times infinity is no number; 1e30 is too far from step 1 on."""
    states, _ = trained(program, task, [3, 5], [0.01, rate], (1,) * STEPS)
    assert states.diverged_at.tolist() == [ALIVE, step]
    assert not differences(member(states, 0), member(pair[0], 0))

    before, _ = trained(program, task, [3, 5], [0.01, rate], (1,) * step)
    assert not differences(member((states.params, states.opt_state), 1), member((before.params, before.opt_state), 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((states.params, states.opt_state)))


def test_a_step_that_is_not_finite_leaves_finite_parameters(program, task):
    """A single bad batch, not a bad learning rate: an input that no longer fits a float."""
    states = program.init(np.array([3, 5]), np.array([0.01, 0.01]))
    poisoned = states.params.embedding[...].at[1].set(jnp.inf)
    states.params.embedding = states.params.embedding.replace(poisoned)
    before = jax.device_get(states.params)
    states, _ = program.advance(states, task, jnp.int32(3))
    assert states.diverged_at.tolist() == [ALIVE, 0]
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(states.params), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
        assert np.isfinite(new[0]).all()


def test_bfloat16_computes_and_float32_remembers(program, task, pair):
    half = replace(program, compute_dtype="bfloat16")
    states, (metrics,) = trained(half, task, [3, 5], [0.01, 0.01])
    assert {x.dtype for x in jax.tree.leaves((states.params, states.opt_state))} <= {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }
    assert states.diverged_at.tolist() == [ALIVE, ALIVE]
    # 8 bits of mantissa: it is another number, and off by no more than some roundings of 2^-8
    assert (metrics["loss"] != pair[1][0]["loss"]).all()
    np.testing.assert_allclose(metrics["loss"], pair[1][0]["loss"], rtol=0.05)

    cast = nnx.to_flat_state(nnx.state(half.model(member(states.params, 0), "bfloat16")))
    assert {x[...].dtype for _, x in cast if isinstance(x, Recurrence)} == {jnp.dtype("float32")}
    assert {x[...].dtype for _, x in cast if not isinstance(x, Recurrence)} == {jnp.dtype("bfloat16")}


def test_the_loss_is_that_of_the_scored_positions_and_no_other_logits_are_computed(program, task, pair):
    params, batch = member(pair[0].params, 0), task.sample(jax.random.key(7), 4, "train")
    loss, metrics = program.score(params, task, batch, None)
    expected = numpy_loss(program.model(params)(batch.inputs), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)  # float32 against float64
    assert metrics["loss"] == loss

    step = jax.make_jaxpr(jax.value_and_grad(program.score, has_aux=True), static_argnums=())(params, task, batch, None)
    shapes = set(all_shapes(step))
    vocab, (rows, length), scored = task.vocab.size, batch.inputs.shape, batch.scored.shape[1]
    assert (rows, scored, vocab) in shapes
    assert not {s for s in shapes if vocab in s and length in s}


def test_a_measure_is_taken_of_each_member(program, task, pair):
    def measure(model, task, key):
        batch = task.sample(key, 4, "test")
        return {"logits": Curve(model.predict(batch.inputs, batch.scored)[:, 0], (("row", (0, 1, 2, 3)),))}

    measure.task_type = type(task)
    (curve,) = program.measure(measure, pair[0], task, jax.random.key(2)).values()
    assert curve.axes == (("row", (0, 1, 2, 3)),)
    batch = task.sample(jax.random.key(2), 4, "test")
    for index in range(2):
        logits = program.model(member(pair[0].params, index))(batch.inputs)[np.arange(4), batch.scored[:, 0]]
        np.testing.assert_allclose(curve.values[index], logits, rtol=1e-4, atol=1e-5)  # logits of order 1 in float32


def test_an_unknown_type_is_refused(program):
    with pytest.raises(ValueError, match="float16 is unknown; use float32 or bfloat16"):
        replace(program, compute_dtype="float16")


def numpy_loss(logits, batch):
    """The mean of -log softmax at the scored positions."""
    logits = np.asarray(logits, np.float64)
    rows = np.arange(len(logits))[:, None]
    logits = logits[rows, np.asarray(batch.scored)]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, np.asarray(batch.targets)[..., None], -1)[..., 0]
    return (nll * np.asarray(batch.weights)).sum() / np.asarray(batch.weights).sum()


def all_shapes(program):
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from all_shapes(inner)
