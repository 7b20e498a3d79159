"""What a checkpoint gives back is what was saved, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.training.checkpoints import Checkpoints


@pytest.fixture
def states(program, task):
    """After three steps, so that nothing is what it was at the start."""
    start = program.init(np.array([3, 5]), np.array([0.01, 0.02]))
    return program.advance(start, task, jnp.int32(3))[0]


def abstract(program):
    return jax.eval_shape(program.init, np.zeros(2, int), np.zeros(2))


def test_a_state_comes_back_to_the_bit(program, states, differences, tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.restore(abstract(program)) is None
        checkpoints.save(3, states, 1.25)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        restored, seconds = checkpoints.restore(abstract(program))
    assert not differences(restored, states)
    assert seconds == 1.25


def test_the_newest_is_restored_and_two_are_kept(program, states, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, states.replace(step=jnp.full(2, step, jnp.int32)), 0.5 * step)
    with Checkpoints(tmp_path) as checkpoints:
        restored, seconds = checkpoints.restore(abstract(program))
    assert restored.step.tolist() == [6, 6]
    assert seconds == 3.0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["4", "6"]


def test_the_next_step_does_not_write_into_what_is_being_saved(program, task, states, tmp_path):
    """The state is donated: its memory is the next state's, while the checkpoint is still being written."""
    expected = jax.device_get(states.params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, states, 0.0)
        advanced, _ = program.advance(states, task, jnp.int32(50))
        jax.block_until_ready(advanced)
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(abstract(program))
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected)


def test_a_restored_state_can_be_trained(program, task, states, differences, tmp_path):
    """It may be donated too, and goes on as the saved one does."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, states, 0.0)
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(states)
    (ours, metrics), (theirs, expected) = (program.advance(s, task, jnp.int32(2)) for s in (restored, states))
    assert not differences(ours, theirs)
    assert not differences(metrics, expected)
