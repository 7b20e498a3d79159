"""Sweeps whose jobs run elsewhere: each launcher for real, what dies and what is stopped, and the search."""

import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from omegaconf import OmegaConf

from seqlab.reporting.results import read_results
from seqlab.sweep import threads

ROOT = Path(__file__).parents[1]
TINY = """# @package _global_
model: {width: 8, depth: 1}
task: {length: 16, pairs: 2, vocab_size: 17}
population: {seeds: 2}
train: {batch_size: 4, steps: 4, chunk: 2, eval_every: 2, checkpoint_every: 2, eval_batches: 1}
measure: {recall: {batches: 1, batch_size: 4}}
"""
NOTING = """import os, pathlib
from seqlab.mixers.rnn import GRU
pathlib.Path("threads").write_text(os.environ["NPROC"])
"""
CORES = len(os.sched_getaffinity(0))
LAUNCHERS = {"parallel": "joblib", "slurm_local": "submitit", "cluster": "ray"}


@pytest.fixture
def here(tmp_path):
    """An experiment and classes of the user's own, of which one notes its threads and one takes its process with it."""
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    (tmp_path / "my_conf" / "experiment" / "tiny.yaml").write_text(TINY)
    (tmp_path / "noting.py").write_text(NOTING)
    (tmp_path / "deadly.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    return tmp_path


def start(line, directory):
    cache = str(jax.config.jax_compilation_cache_dir)
    ours = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    ours |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
    words = [sys.executable, "-m", "seqlab.run", *shlex.split(line)]
    return subprocess.Popen(
        words, cwd=directory, env=os.environ | ours, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process):
    """Its exit code and the lines of its standard error."""
    _, error = process.communicate(timeout=120)
    assert "Traceback" not in error
    return process.returncode, error.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_of_every_launcher_end_each_on_its_own(command, here, launcher):
    """One job finishes, one is refused and two are killed: a bad one stops no other and all are listed with causes."""
    if importlib.util.find_spec(LAUNCHERS[launcher]) is None:
        pytest.skip(f"{LAUNCHERS[launcher]} is not installed; pip install 'seqlab[{LAUNCHERS[launcher]}]'")
    plain = "--config-dir my_conf experiment=tiny model=gru"
    mixers = "model.build.mixer._target_=noting.GRU,deadly.Mixer"
    code, lines = end(start(f"-m {plain} hydra/launcher={launcher} {mixers} train.steps=4,-1", here))
    assert code == 128 + signal.SIGKILL
    (summary,) = (i for i, line in enumerate(lines) if line == "1 of 4 runs finished")
    listed = [line for line in lines[summary + 1 :] if line.startswith("  ")]
    assert [re.sub(r".*_target_=(\S+) train.steps=(\S+): ", r"\1 \2: ", line) for line in listed] == [
        "noting.GRU -1: train.steps=-1 must be at least 1; its default is 1200",
        "deadly.Mixer 4: killed by signal 9 (Killed)",
        "deadly.Mixer -1: train.steps=-1 must be at least 1; its default is 1200",
    ]
    assert int((here / "threads").read_text()) == (max(1, CORES // 2) if launcher == "parallel" else 1)
    typed = command(f"{plain} model.build.mixer._target_=noting.GRU train.steps=4", here)  # the same directory
    assert (typed.code, "is finished already" in typed.lines[0]) == (0, True)


def jobs_at_work(directory):
    """The process of each, which it notes in the lock of its run."""
    return [int(note.split()[1]) for note in (lock.read_text() for lock in directory.rglob("lock")) if note]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stat(process):
    """The kernel's notes of it, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def parent(process):
    return int(stat(process)[1])


def is_alive(process):
    try:
        return stat(process)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_sweep_that_is_stopped_takes_its_jobs_along(here):
    line = (
        "-m --config-dir my_conf experiment=tiny model=gru hydra/launcher=parallel seed=0,1,2 "
        "train.steps=100000 train.chunk=5 train.eval_every=100000 train.checkpoint_every=100"
    )

    def commits():
        return sum("commit_success.txt" in files for _, _, files in os.walk(here / "runs"))

    sweep = start(line, here)  # killed
    until(lambda: commits() >= 2)
    jobs = jobs_at_work(here)
    workers = [parent(job) for job in jobs]
    sweep.kill()
    sweep.wait()
    sweep.stderr.close()
    until(lambda: not any(map(is_alive, jobs + workers)), seconds=5)

    sweep = start(line, here)  # a worker of it is killed
    until(lambda: len(jobs_at_work(here)) >= 2 and not set(jobs) & set(jobs_at_work(here)))
    jobs = jobs_at_work(here)
    os.kill(parent(jobs[0]), signal.SIGKILL)
    code, lines = end(sweep)
    assert code == 1
    assert sum("TerminatedWorkerError" in line for line in lines[-3:]) == 3
    until(lambda: not any(map(is_alive, jobs)), seconds=5)

    before = commits()
    sweep = start(line, here)  # stopped
    until(lambda: commits() >= before + 2)
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does on Ctrl-C, to all of its processes
    code, lines = end(sweep)
    assert code == 128 + signal.SIGINT
    assert "stopping the jobs, each with a checkpoint; once more stops at once" in lines
    assert lines[-4] == "0 of 3 runs finished"
    assert [line.rpartition(": ")[2] for line in lines[-3:]] == [*["stopped by signal 2"] * 2, "not started"]

    results = [read_results(file.parent) for file in here.rglob("results.json")]
    assert [r["status"] for r in results] == ["interrupted"] * 2


def test_what_slurm_is_asked_for(command, tmp_path, monkeypatch):
    """With a queue that takes all jobs and loses them."""
    submitit = pytest.importorskip("submitit", reason="submitit is not installed; pip install 'seqlab[submitit]'")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)  # what it waits for a slow disk
    programs = {
        "sbatch": "cat $1 > asked; echo Submitted batch job 12",
        "sacct": r"printf 'JobID|State\n12_0|OUT_OF_MEMORY\n12_1|OUT_OF_MEMORY\n'",
        "srun": "",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    typed = command("-m hydra/launcher=slurm hydra.launcher.partition=gpu hydra.launcher.mem_gb=8 seed=0,1", tmp_path)
    asked = (tmp_path / "asked").read_text().splitlines()
    for line in ("--partition=gpu", "--mem=8GB", "--cpus-per-task=4", "--array=0-1%2", "--time=240"):
        assert f"#SBATCH {line}" in asked
    assert typed.code == 1
    assert typed.lines[-3] == "0 of 2 runs finished"
    assert typed.lines[-1].startswith("  seed=1: UncompletedJobError: ")


@pytest.mark.parametrize("word", ["launcher=parallel", "launcher=slurm", "launcher=cluster", "sweeper=search"])
def test_what_is_not_installed_is_named(tmp_path, word):
    without = "import hydra_plugins; hydra_plugins.__path__ = []; from seqlab.run import main; main()"
    words = [sys.executable, "-c", without, "-m", f"hydra/{word}", "seed=0,1"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"seqlab: (\w+) is not installed; pip install 'seqlab\[\1\]'\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_refused_sweep_leaves_no_trace(command, tmp_path):
    assert command("-m model=gru,lstmm", tmp_path).code == 2
    assert command("-m train.steps=0,-1", tmp_path).code == 2
    assert not list(tmp_path.iterdir())


def test_jobs_at_once_divide_the_cores_and_a_reservation_is_kept():
    for launcher, expected in [
        ({"n_jobs": 1}, CORES),
        ({"n_jobs": 2}, max(1, CORES // 2)),
        ({"n_jobs": -1}, 1),
        ({"n_jobs": 3 * CORES}, 1),
        ({"cpus_per_task": 3}, 3),
        ({"cpus_per_task": None}, 1),
        ({"ray": {"remote": {"num_cpus": 5}}}, 5),
        ({"ray": {"remote": {}}}, 1),
    ]:
        assert threads(OmegaConf.create(launcher)) == expected, launcher


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("number", [1, 3])
def test_xla_makes_as_many_threads_as_it_is_told(number):
    count = (
        "import jax, os; jax.numpy.ones(3).block_until_ready();"
        "print(sum('XLAEigen' in open(f'/proc/self/task/{t}/comm').read() for t in os.listdir('/proc/self/task')))"
    )
    env = os.environ | {"NPROC": str(number)}
    assert int(subprocess.check_output([sys.executable, "-c", count], env=env)) == number


def test_a_search_goes_where_the_validation_split_is_better_whatever_fails(command, tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed; pip install 'seqlab[optuna]'")

    def search(higher_is_better):
        def run(job):
            rate = job.config.optimizer.learning_rate
            if rate > 5e-3:
                return 3
            if rate > 2e-3:
                raise ValueError("out of luck")
            distance = abs(math.log(rate / 1e-3))
            tuning = {"score": -distance if higher_is_better else distance, "higher_is_better": higher_is_better}
            job.directory.mkdir(parents=True, exist_ok=True)
            (job.directory / "results.json").write_text(json.dumps({"tuning": tuning}))
            return 0

        few = "hydra.sweeper.n_trials=8 hydra.sweeper.sampler.n_startup_trials=4"
        return command(f"-m hydra/sweeper=search {few}", tmp_path, run=run)

    typed = search(higher_is_better=True)
    assert typed.code == 3
    assert any(line.endswith("every member diverged") for line in typed.lines)
    assert any(line.endswith(": ValueError: out of luck") for line in typed.lines)
    rates = [float(line.rpartition("=")[2]) for line in typed.lines if line.startswith("[")]
    best = min((rate for rate in rates if rate <= 2e-3), key=lambda rate: abs(math.log(rate / 1e-3)))
    assert typed.lines[-1].startswith(f"best on the validation split: optimizer.learning_rate={best} (-")
    # the same command goes the same way, and so does a metric of which less is better
    again = search(higher_is_better=False)
    assert again.lines[:-1] == typed.lines[:-1]
    assert again.lines[-1] == typed.lines[-1].replace("(-", "(")


def test_a_search_needs_a_score(command, tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed; pip install 'seqlab[optuna]'")
    typed = command("-m hydra/sweeper=search hydra.sweeper.n_trials=2", tmp_path, run=lambda job: 0)
    assert typed.code == 2
    assert "no tuning.score" in typed.lines[-1]
