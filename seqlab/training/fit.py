"""The loop around the compiled program: advance a chunk, look, write, save. The host is touched once a chunk."""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from seqlab.tasks.base import Task
from seqlab.training.checkpoints import Checkpoints
from seqlab.training.program import ALIVE, Program, TrainState

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
        target: stop when every living member's main metric on the validation split is at least this good; None: never.
    """

    chunk: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    target: float | None = None

    def __post_init__(self):
        if not isinstance(self.target, int | float | None):
            raise ValueError(f"train.target={self.target} is not a number; null never stops early")

    def next_boundary(self, step: int, last: int) -> int:
        periods = (self.chunk, self.eval_every, self.checkpoint_every)
        return min(last, *((step // every + 1) * every for every in periods))


@dataclass
class Fitted:
    """How training ended."""

    states: TrainState
    step: int
    status: Status
    compile_seconds: float
    train_seconds: float
    """Over all sessions of the run, validation and checkpoints included."""
    tokens_per_second: float | None
    """Of this session's training chunks, all members together; None where nothing was left to do."""
    signal: int | None = None


@dataclass
class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop honours after its chunk; a second is not held."""

    signal: int | None = None
    _before: dict = field(default_factory=dict)

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        print("stopping with a checkpoint; once more stops at once", file=sys.stderr, flush=True)
        self.signal = number
        self.__exit__()


def fit(
    program: Program,
    task: Task,
    states: TrainState,
    schedule: Schedule,
    checkpoints: Checkpoints,
    record: Record,
    train_seconds: float = 0.0,
) -> Fitted:
    """Trains from where `states` stand to the end, the target, a request to stop, or the last member's divergence."""
    step = first_step = int(states.step[0])
    saved = step or None
    alive = np.asarray(states.diverged_at) == ALIVE
    chunk_seconds = 0.0

    def validate() -> Mapping[str, np.ndarray]:
        key = jax.random.key(VALIDATION_KEY)
        return jax.device_get(program.evaluate(states, task, key, schedule.eval_batches, "valid"))

    def past_target(scores: Mapping[str, np.ndarray]) -> bool:
        if schedule.target is None:
            return False
        values = scores[task.main_metric][alive]
        return bool(np.all(values >= schedule.target if task.higher_is_better else values <= schedule.target))

    with StopRequest() as stop:
        compile_start = time.perf_counter()
        advance = Program.advance.lower(program, states, task, jnp.int32(1)).compile()
        start = time.perf_counter()
        # A run that its target ended is over, also where a kill kept it from writing its results.
        reached = (
            schedule.target is not None and step > 0 and step % schedule.eval_every == 0 and past_target(validate())
        )
        while step < program.steps and alive.any() and not reached and stop.signal is None:
            boundary = schedule.next_boundary(step, program.steps)
            chunk_start = time.perf_counter()
            states, metrics = advance(states, task, jnp.int32(boundary - step))
            metrics = jax.device_get(metrics)
            chunk_seconds += time.perf_counter() - chunk_start
            step = boundary
            record(step, {f"train/{name}": values for name, values in metrics.items()})
            alive = np.asarray(states.diverged_at) == ALIVE
            if alive.any() and (step % schedule.eval_every == 0 or step == program.steps):
                scores = validate()
                record(step, {f"valid/{name}": values for name, values in scores.items()})
                reached = past_target(scores)
            if step % schedule.checkpoint_every == 0:
                saved = step
                checkpoints.save(step, states, train_seconds + time.perf_counter() - start)
        if saved != step:
            checkpoints.save(step, states, train_seconds + time.perf_counter() - start)
    interrupted = stop.signal is not None and step < program.steps and alive.any() and not reached
    tokens = (step - first_step) * program.batch_size * task.length * len(states.step)
    return Fitted(
        states=states,
        step=step,
        status="interrupted" if interrupted else "finished" if alive.any() else "diverged",
        compile_seconds=start - compile_start,
        train_seconds=train_seconds + time.perf_counter() - start,
        tokens_per_second=tokens / chunk_seconds if chunk_seconds else None,
        signal=stop.signal,
    )
