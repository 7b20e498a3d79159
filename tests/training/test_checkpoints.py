"""What a checkpoint gives back is what was saved, to the bit."""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqlab.training.checkpoints import DIGESTS, Checkpoints


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


@pytest.fixture(scope="module")
def two(program, task, tmp_path_factory):
    """Checkpoints of steps 3 and 5."""
    directory = tmp_path_factory.mktemp("two")
    states = program.init(np.array([3, 5]), np.array([0.01, 0.02]))
    with Checkpoints(directory) as checkpoints:
        for steps in (3, 2):
            states, _ = program.advance(states, task, jnp.int32(steps))
            checkpoints.save(int(states.step[0]), states, 0.0)
    return directory


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


DAMAGES = {
    "flipped": flip_a_bit,
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_is_damaged_is_named_and_the_step_before_is_taken(program, two, tmp_path, capfd, damage):
    """Every file of a checkpoint in turn; one without content can be neither flipped nor cut."""
    names = [path.relative_to(two) for path in (two / "5").rglob("*") if path.is_file()]
    names = [name for name in names if damage == "missing" or (two / name).stat().st_size]
    assert len(names) >= 6
    for i, name in enumerate(names):
        copy = shutil.copytree(two, tmp_path / str(i))
        DAMAGES[damage](copy / name)
        before = contents(copy)
        with Checkpoints(copy) as checkpoints:
            restored, _ = checkpoints.restore(abstract(program))
        assert restored.step.tolist() == [3, 3], name
        problem, fall = capfd.readouterr().err.splitlines()
        assert f"checkpoint 5 of {copy} is damaged: {copy / name}" in problem
        assert fall == "falling back to step 3"
        assert contents(copy) == before


def test_an_array_that_is_not_what_was_saved_is_named_although_its_file_is_as_it_was_written(
    program, two, tmp_path, capfd
):
    """As a fault between memory and disk leaves it: the digest of the array and not that of the file tells."""
    copy = shutil.copytree(two, tmp_path / "copy")
    digests = json.loads((copy / "5" / DIGESTS).read_text().partition("\n")[2])
    digests["leaves"][".learning_rate"][2] = "0" * 64
    content = json.dumps(digests)
    (copy / "5" / DIGESTS).write_text(f"{sha256(content.encode()).hexdigest()}\n{content}")
    with Checkpoints(copy) as checkpoints:
        restored, _ = checkpoints.restore(abstract(program))
    assert restored.step.tolist() == [3, 3]
    assert f"{copy / '5'}: .learning_rate is not what was saved" in capfd.readouterr().err


def test_where_all_are_damaged_it_says_so_and_deletes_nothing(program, two, tmp_path, capfd):
    copy = shutil.copytree(two, tmp_path / "copy")
    for step in ("3", "5"):
        flip_a_bit(copy / step / DIGESTS)
    before = contents(copy)
    with (
        Checkpoints(copy) as checkpoints,
        pytest.raises(ValueError, match="has no checkpoint that is whole; use overwrite=true"),
    ):
        checkpoints.restore(abstract(program))
    assert len(capfd.readouterr().err.splitlines()) == 2
    assert contents(copy) == before


def test_a_damaged_step_is_saved_again_beside_the_damaged_one(program, two, tmp_path, differences):
    copy = shutil.copytree(two, tmp_path / "copy")
    with Checkpoints(copy) as checkpoints:
        whole, _ = checkpoints.restore(abstract(program))
        flip_a_bit(copy / "5" / "_CHECKPOINT_METADATA")
        checkpoints.save(5, whole, 0.0)
    assert sorted(path.name for path in copy.iterdir()) == ["3", "5", "5.damaged"]
    with Checkpoints(copy) as checkpoints:
        assert not differences(checkpoints.restore(abstract(program))[0], whole)


def test_a_kill_during_a_save_leaves_the_one_before(program, two, tmp_path, states):
    """What Orbax has written of step 5, without its digests; the next save clears it away."""
    copy = shutil.copytree(two, tmp_path / "copy")
    (copy / "5" / DIGESTS).unlink()
    (copy / "5").rename(copy / "5.unfinished")
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.restore(abstract(program))[0].step.tolist() == [3, 3]
        checkpoints.save(4, states, 0.0)
    assert sorted(path.name for path in copy.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_what_is_not_finite_is_no_checkpoint(program, states, tmp_path, capfd, part):
    leaves, structure = jax.tree.flatten(getattr(states, part))
    index = next(i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32)
    leaves[index] = leaves[index].at[(0,) * leaves[index].ndim].set(jnp.nan)
    bad = states.replace(**{part: jax.tree.unflatten(structure, leaves)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, states, 0.0)
        checkpoints.save(4, bad, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert f"no checkpoint of step 4: .{part}" in capfd.readouterr().err


def test_another_shape_or_type_is_named_leaf_by_leaf_and_not_loaded(program, two):
    like = abstract(program)
    half = like.replace(learning_rate=jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    longer = like.replace(step=jax.ShapeDtypeStruct((3,), jnp.int32), solved_at=None)
    with Checkpoints(two) as checkpoints:
        with pytest.raises(
            ValueError, match=r"\.learning_rate is float32\[2\] in the checkpoint and bfloat16\[2\] in this"
        ):
            checkpoints.restore(half)
        with pytest.raises(
            ValueError, match=r"\.solved_at is int32\[2\].*missing in this run; \.step is int32\[2\].*int32\[3\]"
        ):
            checkpoints.restore(longer)


@pytest.mark.parametrize("part", ["key", "opt_state", "step", "params", "learning_rate", "diverged_at", "solved_at"])
def test_every_part_of_the_state_is_in_the_checkpoint(program, states, tmp_path, differences, part):
    """Two states that differ in one part come back as two: what is left out would come back alike."""

    def changed(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.vmap(lambda key: jax.random.fold_in(key, 1))(leaf)
        return leaf + jnp.ones((), leaf.dtype)

    other = states.replace(**{part: jax.tree.map(changed, getattr(states, part))})
    for name, state in (("one", states), ("other", other)):
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(3, state, 0.0)
        with Checkpoints(tmp_path / name) as checkpoints:
            assert not differences(checkpoints.restore(abstract(program))[0], state)
    assert differences(states, other)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax drops tasks of a save that failed
def test_a_full_disk_is_one_line_and_what_was_saved_before_stays(program, two, tmp_path, small_disk, differences):
    disk = small_disk(kilobytes=400)
    shutil.copytree(two / "3", disk / "3")
    whole, _ = Checkpoints(disk).restore(abstract(program))
    (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize - 8192))
    before = contents(disk)
    with (
        pytest.raises(
            OSError, match=f"checkpoint 4 cannot be written to {disk}: No space left on device; earlier ones"
        ),
        Checkpoints(disk) as checkpoints,
    ):
        checkpoints.save(4, whole, 0.0)
    assert contents(disk) == before
    with Checkpoints(disk) as checkpoints:
        assert not differences(checkpoints.restore(abstract(program))[0], whole)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
