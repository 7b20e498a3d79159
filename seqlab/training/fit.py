"""The loop around the compiled program: advance a chunk, look, write, save. The host is touched once a chunk."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from seqlab.tasks.base import Task
from seqlab.training.checkpoints import Checkpoints
from seqlab.training.distributed import agree
from seqlab.training.program import ALIVE, UNSOLVED, Program, TrainState
from seqlab.training.stopping import StopRequest

Status = Literal["finished", "interrupted", "diverged"]
Record = Callable[[int, Mapping[str, np.ndarray]], None]
"""Called as record(step, {tag: values [P]})."""

VALIDATION_KEY = 0


@dataclass(frozen=True)
class Schedule:
    """When the loop looks up. Every boundary is a function of the step alone, so a resumed run has the same ones.

    Args:
        chunk: steps between two looks of the host (a log entry, a chance to stop).
        eval_every: steps between two validations, each over `eval_batches` batches.
        checkpoint_every: steps between two checkpoints.
        solved: how good the main metric on the validation split is where the task is solved; None: it never is.
        target: stop when every living member's main metric on the validation split is at least this good; None: never.
    """

    chunk: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    solved: float | None = None
    target: float | None = None

    def __post_init__(self):
        for name, never in (("solved", "counts nothing as solved"), ("target", "never stops early")):
            if not isinstance(getattr(self, name), int | float | None):
                raise ValueError(f"train.{name}={getattr(self, name)} is not a number; null {never}")

    def next_boundary(self, step: int, last: int) -> int:
        periods = (self.chunk, self.eval_every, self.checkpoint_every)
        return min(last, *((step // every + 1) * every for every in periods))


@dataclass
class Fitted:
    """How training ended."""

    program: Program
    """Which trains no more members at once than fit the memory."""
    states: TrainState
    step: int
    status: Status
    validation: Mapping[str, np.ndarray]
    """Metrics [P] of `states` on the validation split; none where the run was interrupted."""
    compile_seconds: float
    train_seconds: float
    """Over all sessions of the run, validation and checkpoints included."""
    tokens_per_second: float | None
    """Of this session's training chunks, all members together; None where nothing was left to do."""
    signal: int | None = None


def fit(
    program: Program,
    task: Task,
    states: TrainState,
    schedule: Schedule,
    checkpoints: Checkpoints,
    record: Record,
    stop: StopRequest,
    train_seconds: float = 0.0,
) -> Fitted:
    """Trains from where `states` stand to the end, the target, a request to stop, or the last member's divergence.

    Raises:
        OSError: a checkpoint could not be written.
    """
    step = first_step = int(states.step[0])
    saved = step or None
    alive = np.asarray(states.diverged_at) == ALIVE
    chunk_seconds = 0.0

    def validate() -> Mapping[str, np.ndarray]:
        key = jax.random.key(VALIDATION_KEY)
        return jax.device_get(program.evaluate(states, task, key, schedule.eval_batches, "valid"))

    def past(bar: float | None, scores: Mapping[str, np.ndarray]) -> Bool[np.ndarray, " P"]:
        values = scores[task.main_metric]
        if bar is None:
            return np.zeros(values.shape, bool)
        return alive & (values >= bar if task.higher_is_better else values <= bar)

    def reached(scores: Mapping[str, np.ndarray]) -> bool:
        return schedule.target is not None and bool(past(schedule.target, scores)[alive].all())

    compile_start = time.perf_counter()
    program, advance = program.compiled(states, task)
    start = time.perf_counter()
    # A run that its target ended is over, also where a kill kept it from writing its results.
    validated = step > 0 and step % schedule.eval_every == 0 and schedule.target is not None
    scores = validate() if validated else {}
    done = not alive.any() or (validated and reached(scores))
    while step < program.steps and not done and not agree(stop.signal or 0):
        checkpoints.check()
        boundary = schedule.next_boundary(step, program.steps)
        chunk_start = time.perf_counter()
        states, metrics = advance(states, task, np.int32(boundary - step))
        metrics = jax.device_get(metrics)
        chunk_seconds += time.perf_counter() - chunk_start
        step, scores = boundary, {}
        record(step, {f"train/{name}": values for name, values in metrics.items()})
        alive = np.asarray(states.diverged_at) == ALIVE
        done = not alive.any()
        if not done and (step % schedule.eval_every == 0 or step == program.steps):
            scores = validate()
            record(step, {f"valid/{name}": values for name, values in scores.items()})
            done = reached(scores)
            states = mark_solved(program, states, past(schedule.solved, scores), step)
        if step % schedule.checkpoint_every == 0:
            saved = step
            checkpoints.save(step, states, train_seconds + time.perf_counter() - start)
    if saved != step:
        checkpoints.save(step, states, train_seconds + time.perf_counter() - start)
    checkpoints.wait()
    stop.signal = agree(stop.signal or 0) or None
    interrupted = stop.signal is not None
    return Fitted(
        program=program,
        states=states,
        step=step,
        status="interrupted" if interrupted else "finished" if alive.any() else "diverged",
        validation={} if interrupted else scores or validate(),
        compile_seconds=start - compile_start,
        train_seconds=train_seconds + time.perf_counter() - start,
        tokens_per_second=(step - first_step) * program.batch_size * task.length * len(alive) / chunk_seconds
        if chunk_seconds
        else None,
        signal=stop.signal,
    )


def mark_solved(program: Program, states: TrainState, solved: Bool[np.ndarray, " P"], step: int) -> TrainState:
    """Members that solve the task for the first time at this step."""
    before = np.asarray(states.solved_at)
    solved_at = np.where(solved & (before == UNSOLVED), np.int32(step), before)
    return replace(states, solved_at=program.layout.place_whole(jnp.asarray(solved_at)))
