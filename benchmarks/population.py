"""What a population saves, and what checkpoints and the loop cost: `python -m benchmarks.population [NAME]`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from benchmarks.steps import advancing, composed, population
from benchmarks.timing import Goal, main, ratios, take_turns
from seqlab.reporting.tensorboard import TensorBoard
from seqlab.training.checkpoints import Checkpoints
from seqlab.training.fit import Schedule, fit
from seqlab.training.program import Program
from seqlab.training.stopping import StopRequest

FAMILIES = ("gru", "mingru", "mlstm", "ssm", "mamba", "rglru", "gla", "gated_deltanet", "transformer", "hyena")
MEMBERS = 8
SHORT = "task.length=32 task.pairs=4 train.batch_size=16 model.width=32 train.steps=1000"


def member_steps(rounds: int) -> list[Table]:
    """A member's step in a population against a step alone, batch 32."""
    steps = 3

    def compare(model: str) -> Table:
        task, program = composed(f"model={model}", "train.batch_size=32")

        def advance_by(program: Program, steps: int):
            return lambda states: program.advance(states, task, jnp.int32(steps))[0]

        in_turn = replace(program, max_parallel=1)
        candidates = {
            "alone": advancing(advance_by(program, steps * MEMBERS), population(program, 1)),
            "8 members, in turn": advancing(advance_by(in_turn, steps), population(program, MEMBERS)),
            "8 members, at once": advancing(advance_by(program, steps), population(program, MEMBERS)),
        }
        goal = Goal("8 members, in turn", 0.95)  # which is what max_parallel=auto does on a CPU
        return ratios(f"A member's step, model={model}", take_turns(candidates, rounds, steps * MEMBERS), goal)

    return [compare(model) for model in FAMILIES]


def end_to_end(rounds: int) -> list[Table]:
    """One command for 8 members against 8 commands, all compiled before: from their start to their results."""
    rounds = min(rounds, 2)

    def compare(model: str) -> Table:
        seconds = {name: np.zeros(rounds) for name in ("8 runs one after another", "one run of 8 members")}

        def run(directory: str, seed: int, members: int) -> float:
            words = [f"model={model}", *SHORT.split(), f"seed={seed}", f"population.seeds={members}"]
            before = time.perf_counter()
            command = [sys.executable, "-m", "seqlab.run", *words, f"runs={directory}"]
            subprocess.run(command, env=os.environ, check=True, stderr=subprocess.DEVNULL)
            return time.perf_counter() - before

        for i in range(-1, rounds):  # the first round fills the cache of compiled programs
            with tempfile.TemporaryDirectory() as directory:
                one_by_one = sum(run(directory, seed, 1) for seed in range(1 if i < 0 else MEMBERS))
                together = run(directory, 0, MEMBERS)
            if i >= 0:
                seconds["8 runs one after another"][i], seconds["one run of 8 members"][i] = one_by_one, together
        return ratios(f"From command to results, model={model} {SHORT}", seconds, Goal("one run of 8 members", 0.7))

    return [compare(model) for model in ("gru", "transformer")]


def saving(rounds: int) -> list[Table]:
    """A checkpoint, until all of it is on disk, against the 200 steps between two."""
    steps = 10

    def compare(model: str) -> Table:
        task, program = composed(f"model={model}")
        states = population(program, 4)
        with tempfile.TemporaryDirectory() as directory, Checkpoints(Path(directory)) as checkpoints:
            number = iter(range(1, 1000))

            def save() -> None:
                checkpoints.save(next(number), states, 0.0)
                checkpoints.wait()

            train = advancing(lambda states: program.advance(states, task, jnp.int32(steps))[0], population(program, 4))
            seconds = take_turns({"200 steps": train, "a checkpoint": save}, rounds)
        seconds["200 steps"] *= 200 / steps
        return ratios(f"Four members, model={model}", seconds, Goal("a checkpoint", 0.03))

    return [compare(model) for model in ("gru", "transformer")]


def looking(rounds: int) -> list[Table]:
    """What the loop does between two chunks (metrics to the host, TensorBoard, all that is decided there) against the
    50 steps of a chunk: training as many steps in 100 chunks and in one."""
    steps = 100

    def own_seconds(chunk: int) -> float:
        task, program = composed("model=gru", "experiment=smoke", f"train.steps={steps}")
        schedule = Schedule(chunk=chunk, eval_every=steps, eval_batches=1, checkpoint_every=steps)
        with (
            tempfile.TemporaryDirectory() as directory,
            Checkpoints(Path(directory)) as checkpoints,
            TensorBoard(Path(directory), 0) as board,
            StopRequest() as stop,
        ):

            def record(step: int, values: Mapping[str, np.ndarray]) -> None:
                board.scalars(step, values)
                board.flush()

            fitted = fit(program, task, population(program, 4), schedule, checkpoints, record, stop)
        assert fitted.tokens_per_second is not None
        trained = steps * program.batch_size * task.length * 4 / fitted.tokens_per_second
        return fitted.train_seconds - trained

    task, program = composed("model=gru")
    train = advancing(lambda states: program.advance(states, task, jnp.int32(50))[0], population(program, 4))
    seconds = take_turns({"50 steps": train}, rounds)
    looks = [(own_seconds(1) - own_seconds(steps)) / (steps - 1) for _ in range(rounds)]
    return [ratios("Four members, model=gru", {**seconds, "a look": np.array(looks)}, Goal("a look", 0.02))]


BENCHMARKS = {"member_steps": member_steps, "end_to_end": end_to_end, "saving": saving, "looking": looking}


if __name__ == "__main__":
    main("What a population saves, and what keeping it safe costs", BENCHMARKS)
