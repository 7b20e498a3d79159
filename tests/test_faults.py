"""Runs that are killed, crowded, starved of disk: whatever happens, what the same command comes to in the end is to the
bit what a run comes to that nothing disturbed.

Everything happens to processes of their own, as it would to a user.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqlab.reporting.results import read_results
from seqlab.training.checkpoints import _read_digests

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.width=8 model.dropout=0.1 task.length=16 task.pairs=2 task.vocab_size=17 population.seeds=2 "
    "train.batch_size=4 train.eval_batches=1 measure.recall.batches=1 measure.recall.batch_size=4 "
    "train.chunk=1 train.eval_every=4 train.checkpoint_every=1"
)
ONE = f"model=gru model.depth=1 {SMALL} train.steps=60"
FAMILIES = "gru,mingru,mlstm,ssm,mamba,rglru,gla,gated_deltanet,attention,hyena"
ALL_FAMILIES = f"model=hybrid pattern=[{FAMILIES}] model.convolution=3 {SMALL} train.steps=12"
SWEEP = f"-m model=gru,ssm,transformer model.depth=1 {SMALL} train.steps=10"
TIMES = ("tokens_per_second", "compile_seconds", "train_seconds")


def environment():
    cache = jax.config.jax_compilation_cache_dir
    ours = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    return os.environ | ours | {"COLUMNS": "200"}


class Command:
    """`python -m seqlab.run ...` in a directory, as a process that can be hurt."""

    def __init__(self, line, directory):
        directory.mkdir(exist_ok=True)
        self.directory = directory
        words = [sys.executable, "-m", "seqlab.run", *shlex.split(line)]
        with (directory / "log.txt").open("a") as log:
            self.process = subprocess.Popen(words, cwd=directory, env=environment(), stdout=log, stderr=log)

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        return self.end()

    def end(self):
        return self.process.wait(timeout=300)

    def wait_until(self, condition, seconds=120):
        """False where the process ended before."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if condition():
                return True
            assert time.monotonic() < deadline, f"not after {seconds} s: {(self.directory / 'log.txt').read_text()}"
            time.sleep(0.003)
        return False


def run_to_the_end(line, directory):
    command = Command(line, directory)
    assert command.end() == 0, (directory / "log.txt").read_text()
    return directory


def names_below(directory):
    """Without minding what is renamed meanwhile, as `rglob` does."""
    return [name for _, directories, _ in os.walk(directory) for name in directories]


def newest_step(directory):
    return max((int(name) for name in names_below(directory / "runs") if name.isdigit()), default=0)


def saving(directory):
    return any(".unfinished" in name for name in names_below(directory / "runs"))


def outcome(directory):
    """All that must not depend on what happened on the way: parameters and all the rest of the state by their digests,
    every value that TensorBoard shows, the results."""
    found = {}
    for file in sorted((directory / "runs").rglob("results.json")):
        run, results = file.parent, read_results(file.parent)
        newest = max((int(path.name), path) for path in (run / "checkpoints").glob("*") if path.name.isdigit())[1]
        leaves = _read_digests(newest)["leaves"]
        boards = {}
        for sibling in ("", "low", "high"):
            board = EventAccumulator(
                str(run / sibling), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
            ).Reload()
            tags = board.Tags()
            boards[sibling] = {
                **{tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags["scalars"]},
                **{tag: [event.step for event in board.Images(tag)] for tag in tags["images"]},
                **{tag: [event.step for event in board.Tensors(tag)] for tag in tags["tensors"]},
            }
        assert results["cost"].keys() > set(TIMES)
        results["cost"] = {name: value for name, value in results["cost"].items() if name not in TIMES}
        found[run.relative_to(directory)] = {
            "step": newest.name,
            "leaves": {name: leaf for name, leaf in leaves.items() if name != "train_seconds"},
            "boards": boards,
            "results": results,
        }
    return found


def assert_no_step_is_missing_or_twice(boards, steps):
    assert [step for step, _ in boards[""]["train/loss"]] == list(range(1, steps + 1))
    for board in boards.values():
        for tag, events in board.items():
            seen = [event[0] if isinstance(event, tuple) else event for event in events]
            assert len(seen) == len(set(seen)), tag


@pytest.mark.slow
def test_a_run_killed_twenty_times_is_the_run_that_was_never_killed(tmp_path):
    """Between saves and during them, while starting, and while measuring; by kill -9 and by SIGTERM."""
    whole = outcome(run_to_the_end(ONE, tmp_path / "whole"))
    rng, hurt, codes = random.Random(0), tmp_path / "hurt", []
    for attempt in range(20):
        command = Command(ONE, hurt)
        begun, moment = newest_step(hurt), attempt % 4
        if moment == 0:  # during a save, after some others
            command.wait_until(lambda begun=begun: newest_step(hurt) > begun and saving(hurt))
        elif moment == 3:  # whenever
            command.wait_until(lambda until=time.monotonic() + rng.uniform(0, 8): time.monotonic() > until)
        else:  # a moment after a save
            command.wait_until(lambda begun=begun: newest_step(hurt) > begun)
            time.sleep(rng.uniform(0, 0.2))
        codes.append(command.kill(signal.SIGTERM if moment == 2 else signal.SIGKILL))
    assert codes.count(-signal.SIGKILL) >= 12 and codes.count(143) >= 3, codes
    command = Command(ONE, hurt)
    assert command.wait_until(lambda: newest_step(hurt) == 60), codes
    time.sleep(1)
    command.kill()  # while it measures
    found = outcome(run_to_the_end(ONE, hurt))
    assert found == whole
    (run,) = found.values()
    assert_no_step_is_missing_or_twice(run["boards"], 60)


@pytest.mark.slow
def test_every_family_of_mixers_resumes_to_the_bit(tmp_path):
    """All of them in one model, with dropout."""
    whole = outcome(run_to_the_end(ALL_FAMILIES, tmp_path / "whole"))
    hurt, rng = tmp_path / "hurt", random.Random(1)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        command, begun = Command(ALL_FAMILIES, hurt), newest_step(hurt)
        assert command.wait_until(lambda begun=begun: newest_step(hurt) > begun + 1)
        time.sleep(rng.uniform(0, 0.3))
        assert command.kill(number) == (143 if number == signal.SIGTERM else -number)
    found = outcome(run_to_the_end(ALL_FAMILIES, hurt))
    assert found == whole
    (run,) = found.values()
    assert_no_step_is_missing_or_twice(run["boards"], 12)
    assert set(FAMILIES.split(",")) <= set(run["results"]["config"]["model"]["parts"])


@pytest.mark.slow
def test_a_sweep_killed_three_times_completes_only_what_is_missing(tmp_path):
    whole = outcome(run_to_the_end(SWEEP, tmp_path / "whole"))
    assert len(whole) == 3
    hurt, rng, done = tmp_path / "hurt", random.Random(2), {}

    def finished():
        files = (hurt / "runs").rglob("results.json")
        return {file: file.stat().st_mtime_ns for file in files if '"status": "finished"' in file.read_text()}

    for attempt in range(3):
        command = Command(SWEEP, hurt)
        assert command.wait_until(
            lambda attempt=attempt: (
                len(names_below(hurt / "runs" / "mqar")) > 0 and len(list((hurt / "runs" / "mqar").glob("*"))) > attempt
            )
        )
        time.sleep(rng.uniform(0, 4))
        command.kill()
        now = finished()
        assert done.items() <= now.items()  # nothing is done again
        done = now
    found = outcome(run_to_the_end(SWEEP, hurt))
    assert found == whole
    assert done.items() <= finished().items()
    tables = [table(tmp_path / name) for name in ("whole", "hurt")]
    assert tables[0] == tables[1]


def table(directory):
    words = [sys.executable, "-m", "seqlab.compare", "runs"]
    done = subprocess.run(words, cwd=directory, env=environment(), capture_output=True, text=True, check=True)
    return [line.split("│")[:4] for line in done.stdout.splitlines()]


def test_sigterm_while_nothing_is_trained_ends_as_interrupted(tmp_path):
    """After its last checkpoint, while it compiles its measures."""
    line = ONE.replace("train.steps=60", "train.steps=2")
    command = Command(line, tmp_path)
    assert command.wait_until(lambda: newest_step(tmp_path) == 2)
    time.sleep(0.3)
    assert command.kill(signal.SIGTERM) == 143
    (file,) = (tmp_path / "runs").rglob("results.json")
    assert read_results(file.parent)["status"] == "interrupted"
    assert "Traceback" not in (tmp_path / "log.txt").read_text()
    run_to_the_end(line, tmp_path)
    assert read_results(file.parent)["status"] == "finished"


def test_a_second_process_on_one_directory_stops_at_once_and_names_the_first(tmp_path):
    first = Command(ONE, tmp_path / "runs_of_both")
    assert first.wait_until(lambda: newest_step(first.directory) > 0)
    start = time.monotonic()
    words = [sys.executable, "-m", "seqlab.run", *shlex.split(ONE)]
    second = subprocess.run(words, cwd=first.directory, env=environment(), capture_output=True, text=True)
    assert first.process.poll() is None, "the first was over too soon for this test"
    assert time.monotonic() - start < 30
    assert second.returncode == 2
    (line,) = second.stderr.splitlines()
    assert f"is in the hands of process {first.process.pid} on " in line
    again = [*words, "overwrite=true"]
    assert subprocess.run(again, cwd=first.directory, env=environment(), capture_output=True).returncode == 2
    assert first.end() == 0


def test_a_full_disk_is_one_line_and_the_run_goes_on_where_there_is_room(tmp_path, small_disk):
    disk = small_disk(kilobytes=300)
    words = [sys.executable, "-m", "seqlab.run", *shlex.split(ONE), f"runs={disk}/runs"]
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    _, line = done.stderr.splitlines()
    assert line.startswith("seqlab: ") and "No space left on device" in line
    kept = newest_step(disk)
    assert kept > 0
    subprocess.run(["mount", "-o", "remount,size=4000k", str(disk)], check=True)
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {kept} of 60" in done.stderr


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path, small_disk):
    disk = small_disk(kilobytes=4000)
    words = [sys.executable, "-m", "seqlab.run", *shlex.split(ONE), f"runs={disk}/runs"]
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Read-only file system" in line and str(disk) in line
