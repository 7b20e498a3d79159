"""On a mesh of devices a population trains as on one: each axis alone, all together, and across a resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqlab.reporting.results import read_results
from seqlab.training.distributed import detected, initialize
from seqlab.training.mesh import Layout

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
"""Of a loss after a few steps. The sums of a gradient have some 2^8 terms; in another order they differ by 2^4
roundings of 2^-24, or 1e-6, which a few steps of Adam multiply by about 10 (as in test_program.py)."""
LAYOUTS = {
    "population": Layout(8, 1, 1, 1),
    "data": Layout(1, 8, 1, 1),
    "model": Layout(1, 1, 4, 1),
    "all": Layout(2, 2, 2, 1),
    "whole matrices": Layout(2, 4, 1),
}


def environment(devices=None):
    ours = {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"} if devices else {}
    return os.environ | ours | flags


over = partial(Layout.over, members=4, examples=16, splits=[64, 4])


@pytest.mark.parametrize(
    ("devices", "asked", "sizes"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (2, 1, 1)),
        (8, {}, (4, 2, 1)),
        (8, {"members": 3}, (1, 8, 1)),
        (8, {"members": 3, "examples": 2}, (1, 2, 4)),
        (8, {"members": 3, "examples": 1, "splits": [64, 6]}, (1, 1, 2)),
        (8, {"population": 1}, (1, 8, 1)),
        (8, {"model": 2}, (4, 1, 2)),
        (8, {"population": 2, "data": 2, "model": 1}, (2, 2, 1)),
        (8, {"population": 1, "data": 1, "model": 1}, (1, 1, 1)),
        (6, {"population": None}, (2, 1, 1)),
    ],
)
def test_auto_spreads_members_first_then_examples_then_matrices(devices, asked, sizes):
    layout = over(devices, **asked)
    assert (layout.population, layout.data, layout.model) == sizes


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"population": 3}, "mesh.population=3 does not divide the 4 members trained at once; use 4, or auto"),
        ({"data": 32}, "mesh.data=32 does not divide the 16 examples of a batch; use 8, or auto"),
        ({"model": 8}, "mesh.model=8 does not divide the model's width and heads, 64, 4; use 4, or auto"),
        ({"population": 4, "data": 4}, "mesh.population=4 mesh.data=4 need 16 devices, and there are 8"),
        ({"data": "many"}, "mesh.data=many is no number of devices"),
        ({"data": True}, "mesh.data=True is no number of devices"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(asked, words):
    with pytest.raises(ValueError, match=words) as refusal:
        over(8, **asked)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("step", (4,), ()),
        ("params.embedding", (4, 96, 64), ("population", "model", "data")),
        ("params.embedding", (4, 97, 64), ("population", None, "model")),  # words that two do not divide
        ("params.head.kernel", (4, 64, 96), ("population", "data", "model")),
        ("params.blocks.0.mixer.query.kernel", (4, 3, 64, 64), ("population", None, "data", "model")),
        ("params.blocks.0.mixer.out.kernel", (4, 3, 64, 64), ("population", None, "model", "data")),
        ("opt_state.1.mu.blocks.0.mlp.out.kernel", (4, 3, 256, 64), ("population", None, "model", "data")),
        ("params.blocks.0.mixer.query.bias", (4, 3, 4096), ("population",)),
        ("params.blocks.0.mixer.query.kernel", (4, 3, 16, 16), ("population",)),  # small
        ("params.blocks.0.mixer.c_re", (4, 3, 63, 64), ("population", None, None, "model")),
    ],
)
def test_a_place_follows_from_name_and_shape(path, shape, spec):
    found = Layout(2, 2, 2, shard_above=1000).spec(path.split("."), shape, recurrent=False)
    assert tuple(found) + (None,) * (len(shape) - len(found)) == spec + (None,) * (len(shape) - len(spec))


def test_a_recurrence_stays_whole():
    assert Layout(2, 2, 2, 1).spec(["blocks", "recurrent"], (4, 3, 64, 64), True)[1:] == (None, None, None)


def test_one_device_has_no_mesh_and_nothing_is_touched(program, task):
    layout = Layout()
    assert layout.mesh is layout.member_axis is None
    states = program.init(np.array([3, 5]), np.full(2, 0.01))
    assert layout.constrain(states) is layout.at_use(states) is layout.spread(states) is layout.repeat(states) is states
    written = jax.make_jaxpr(partial(program.train_step, task=task))(jax.tree.map(lambda x: x[0], states))
    assert "sharding_constraint" not in str(written)


def test_what_is_gathered_is_a_copy_and_what_is_placed_is_what_was_gathered(program, task, differences):
    states = program.init(np.array([3, 5]), np.full(2, 0.01))
    layout = program.layout
    whole = layout.gather(states.params)
    before = jax.tree.map(np.copy, whole)
    placed = states.replace(params=layout.place(whole))
    assert not differences(placed, states)
    program.advance(states, task, jnp.int32(2))  # donated: its memory is written to
    jax.tree.map(np.testing.assert_array_equal, whole, before)


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # a batch script
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_NTASKS": "4"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ],
)
def test_other_processes_are_found_where_something_started_them(environment, several):
    assert detected(environment) is several


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ({"coordinator": "localhost:1"}, "distributed.processes is missing"),
        ({"coordinator": "localhost:1", "processes": 2, "process": 2}, "process=2 is none of the .*processes=2"),
    ],
)
def test_half_an_address_is_refused(words, refusal):
    with pytest.raises(ValueError, match=refusal):
        initialize(**words)


def on_eight_devices():
    """Prints, as JSON, what training on each layout gives; in a process of its own."""
    from seqlab.mixers.attention import Attention
    from seqlab.mlp import MLP
    from seqlab.model import SequenceModel
    from seqlab.tasks.mqar import MQAR
    from seqlab.training.optimizer import AdamW
    from seqlab.training.program import Program

    task = MQAR(length=16, pairs=2, vocab_size=16)
    build = partial(SequenceModel, 16, width=16, depth=2, mixer=partial(Attention, heads=4), mlp=MLP)
    plain = Program(build, AdamW(1e-2), steps=10, batch_size=16, max_parallel=8)
    programs = {"one": plain} | {name: replace(plain, layout=layout) for name, layout in LAYOUTS.items()}
    programs["all in groups and parts"] = replace(programs["all"], max_parallel=4, accumulation=2)
    found = {}
    for name, program in programs.items():
        states = program.init(np.arange(8), np.full(8, 1e-2))
        before = jax.tree.map(lambda x: x.sharding, states)
        _, advance = program.compiled(states, task)
        losses = []
        for _ in range(3):  # the same compiled call, so that its results must lie where its arguments do
            states, metrics = advance(states, task, np.int32(2))
            losses.append(np.asarray(metrics["loss"]).tolist())
        stays = all(
            old.is_equivalent_to(x.sharding, x.ndim)
            for old, x in zip(jax.tree.leaves(before), jax.tree.leaves(states), strict=True)
        )
        scores = program.evaluate(states, task, jax.random.key(0), 2, "valid")["loss"]
        again = program.layout.place(states.replace(params=program.layout.gather(states.params)))
        loops = [line for line in advance.as_text().splitlines() if "/while/body" in line and "closed_call" in line]
        found[name] = {
            "losses": losses,
            "valid": np.asarray(scores).tolist(),
            "stays": stays,
            "again": bool(jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.params, states.params))),
            "numbers": [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(states.opt_state)],
            "gathered": [line.split("= ")[1].split("{")[0] for line in loops if " all-gather(" in line],
        }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def eight():
    done = subprocess.run(
        [sys.executable, __file__], env=environment(8), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "all in groups and parts"])
def test_the_loss_curve_is_that_of_one_device(eight, name):
    for quantity in ("losses", "valid"):
        np.testing.assert_allclose(eight[name][quantity], eight["one"][quantity], rtol=TOLERANCE)
    assert np.ptp(eight["one"]["losses"][0]) > 100 * TOLERANCE  # members differ by more than the tolerance
    assert eight[name]["stays"]
    assert eight[name]["again"]


@pytest.mark.slow
def test_a_device_holds_its_part_and_gathers_matrices_rather_than_examples(eight):
    """FSDP as it is meant: of the optimizer state a part, and in the loop over layers only matrices move."""
    for name, parts in (("population", 8), ("data", 8), ("model", 4), ("all", 8)):
        assert min(eight[name]["numbers"]) == 1 / parts
    tokens = 16 * 16
    assert eight["data"]["gathered"]
    assert not [shape for shape in eight["data"]["gathered"] if f",{tokens}," in shape]
    assert "f32[8,16,64]" in eight["data"]["gathered"]  # the MLP's


SMALL = (
    "model=transformer model.width=8 model.depth=1 model.heads=2 task.length=16 task.pairs=2 task.vocab_size=17 "
    "population.seeds=4 train.batch_size=8 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4 "
    "train.steps=8 train.chunk=2 train.eval_every=4 train.checkpoint_every=2 mesh.shard_above=1"
)
DRIVER = """
import os, sys
from seqlab.reporting.tensorboard import TensorBoard
scalars, (step, number) = TensorBoard.scalars, (int(word) for word in os.environ["STOP"].split(":"))
def interrupt(board, at, values):
    scalars(board, at, values)
    if at == step and "train/loss" in values:
        os.kill(os.getpid(), number)
TensorBoard.scalars = interrupt
from seqlab.run import main
main()
"""


@pytest.fixture(scope="module")
def start():
    """A run in a process of its own; `stop`, as in "4:15", sends it a signal at a step."""
    started = []

    def start(directory, words=(), devices=None, stop=None):
        program = ["-m", "seqlab.run"] if stop is None else ["-c", DRIVER]
        process = subprocess.Popen(
            [sys.executable, *program, *SMALL.split(), *words],
            cwd=directory,
            env=environment(devices) | ({"STOP": stop} if stop else {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:  # a test that fails leaves none behind
        process.kill()
        process.wait()
        process.stderr.close()


def ended(process, code):
    _, error = process.communicate(timeout=300)
    assert process.returncode == code, error
    return error


def curve(directory):
    """The members' mean loss at each step, and what the run says of itself."""
    (results,) = directory.rglob("results.json")
    scalars = EventAccumulator(str(results.parent)).Reload().Scalars("train/loss")
    assert [event.step for event in scalars] == [2, 4, 6, 8]
    return [event.value for event in scalars], read_results(results.parent)


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    """The run on one device that nothing interrupts."""
    directory = tmp_path_factory.mktemp("alone")
    ended(start(directory), 0)
    return curve(directory)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_is_taken_up_by_fewer(start, alone, tmp_path):
    (first := tmp_path / "8").mkdir()
    assert "2 x data 2 x model 2" in ended(
        start(first, ["mesh.population=2", "mesh.data=2", "mesh.model=2"], 8, f"4:{signal.SIGTERM}"), 143
    )
    for devices in (1, 2, 4):
        directory = shutil.copytree(first, tmp_path / str(devices))
        assert "resuming at step 4 of 8" in ended(start(directory, devices=devices), 0)
        losses, results = curve(directory)
        assert results["status"] == "finished"
        np.testing.assert_allclose(losses, alone[0], rtol=TOLERANCE)


@pytest.mark.slow
def test_two_processes_train_stop_die_and_resume_as_one(start, alone, tmp_path):
    ports = iter(range(20000 + os.getpid() % 10000, 40000))

    def both(stops):
        address = [f"distributed.coordinator=localhost:{next(ports)}", "distributed.processes=2"]
        return [start(tmp_path, [*address, f"distributed.process={i}"], stop=stop) for i, stop in enumerate(stops)]

    # the second is asked to stop, and both do at the same step
    for process in both([None, f"2:{signal.SIGTERM}"]):
        ended(process, 143)
    assert [path.name for path in tmp_path.rglob("checkpoints/*")] == ["2"]

    first, second = both([f"6:{signal.SIGKILL}", None])
    ended(first, -signal.SIGKILL)
    second.kill()  # by itself it would notice after a minute or two
    second.communicate()
    assert int(max(path.name for path in tmp_path.rglob("checkpoints/*") if path.name.isdigit())) in (2, 4)

    first, second = both([None, None])
    assert "resuming at step" in ended(first, 0)
    ended(second, 0)
    losses, results = curve(tmp_path)
    assert results["status"] == "finished"
    assert results["device"].startswith("2 x")
    np.testing.assert_allclose(losses, alone[0], rtol=TOLERANCE)


if __name__ == "__main__":
    on_eight_devices()
