"""Trains a population of one model on one task, measures it and records it: `python -m seqlab.run model=ssm task=mqar`.

compose -> train -> measure -> report. JAX is imported only once there is something to compute.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import OmegaConf

from seqlab.commandline import DIVERGED, OK, Job, RefusedError, refusals, say
from seqlab.directory import check_directory, locked, prepare_directory
from seqlab.launch import launch
from seqlab.matching import matched
from seqlab.training.distributed import initialize, writer_first

if TYPE_CHECKING:
    from seqlab.reporting.results import Results
    from seqlab.reporting.tensorboard import TensorBoard
    from seqlab.tasks.base import Task
    from seqlab.training.checkpoints import Checkpoints
    from seqlab.training.fit import Fitted, Schedule
    from seqlab.training.mesh import Layout
    from seqlab.training.program import Program, TrainState
    from seqlab.training.stopping import StopRequest

SIGNALLED = 128  # an exit code of 128 + n says that signal n ended the process
EXIT_CODES = {"finished": OK, "diverged": DIVERGED}


def main() -> None:
    sys.exit(launch(run))


def run(job: Job) -> int:
    """One run, from its start or its last checkpoint to its results; returns the exit code."""
    from seqlab.reporting.results import read_results, write_results

    with refusals():
        initialize(**job.config.distributed)
        job = matched(job)
        with writer_first() as writer:
            if writer:
                check_directory(job)
        before = None
        if (job.directory / "results.json").exists() and not job.config.overwrite:
            before = read_results(job.directory)
    if before is not None and before["status"] in EXIT_CODES:
        say(f"{job.directory} is {before['status']} already; overwrite=true starts it anew")
        return show(before)

    use_compilation_cache()
    from seqlab.record import blank_results
    from seqlab.training.stopping import StoppedError, StopRequest

    with ExitStack() as held:
        stop = held.enter_context(StopRequest())
        with refusals():
            task, program = build(job)
            results = blank_results(job, task, program)
            with writer_first() as writer:
                if writer:
                    held.enter_context(locked(job))
                    prepare_directory(job, task)
        held.callback(free_compiled_programs)
        output = job.directory
        if not writer:
            output = Path(held.enter_context(TemporaryDirectory()))
            held.enter_context(redirect_stderr(StringIO()))
        say(f"{opening_line(job, results)}{program.layout.said}")
        try:
            train_and_measure(job, task, program, results, stop, output)
        except StoppedError as stopped:
            say(f"{stopped}; the same command goes on from the last checkpoint")
            for part in (results, *results["members"]):
                part["status"] = "interrupted"
        except RefusedError:
            raise
        except Exception:
            with suppress(OSError):  # the disk that is full
                write_results(output, results | {"status": "failed"})
            raise
        write_results(output, results)
        return show(results, stop.signal)


def build(job: Job) -> tuple["Task", "Program"]:
    """The task and the training program, from constructor calls in the configuration; nothing is compiled yet.

    Raises:
        ValueError: some values do not fit together.
    """
    from hydra.utils import instantiate

    from seqlab.training.program import Program

    config = job.config
    task = instantiate(config.task, _convert_="all")
    program = Program(
        build=partial(instantiate(config.model.build), task.vocab.size),
        optimizer=instantiate(config.optimizer),
        steps=config.train.steps,
        batch_size=config.train.batch_size,
        compute_dtype=config.train.compute_dtype,
        accumulation=config.train.accumulation,
        max_parallel=members_at_once(config.population.max_parallel),
    )
    try:
        causal = program.abstract_model.causal
    except TypeError as error:  # an argument that a constructor does not know
        raise ValueError(f"model={job.choices['model']} cannot be built: {error}") from error
    program = replace(program, layout=layout(job, program))
    task = program.layout.place_whole(task.asked_of(causal))
    for length in (task.length, *getattr(task, "eval_lengths", ())):
        program.abstract_model.position.admit(length)
    schedule(job)
    for measure in map(instantiate, config.measure.values()):
        if not isinstance(task, measure.task_type):
            chosen = f"measure={job.choices['measure']}"
            raise ValueError(f"{chosen} looks at {measure.task_type.__name__}, not at task={job.choices['task']}")
    return task, program


def members_at_once(asked: int | str | None) -> int | None:
    """Raises ValueError where that is no number."""
    if asked in ("auto", None):
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ValueError(f"population.max_parallel={asked} is no number of members; use 1 or more, or auto")
    return asked


def layout(job: Job, program: "Program") -> "Layout":
    """How the devices are used.

    Raises:
        ValueError: the numbers do not fit together.
    """
    import jax

    from seqlab.record import members
    from seqlab.training.mesh import Layout

    model = program.abstract_model
    width = model.embedding.shape[-1]
    return Layout.over(
        jax.device_count(),
        members=program.width(len(members(job))),
        examples=program.batch_size // program.accumulation,
        splits=[width, *(getattr(mixer, "heads", width) for mixer in model.mixers)],
        **job.config.mesh,
    )


def train_and_measure(
    job: Job, task: "Task", program: "Program", results: "Results", stop: "StopRequest", output: Path
) -> None:
    """The run proper: fills in its results, and writes to TensorBoard in `output`.

    Raises:
        StoppedError: a signal came while nothing was being trained.
        OSError: the directory cannot be written any more.
    """
    from seqlab.record import add_measures, add_training, add_tuning, hyperparameters, report
    from seqlab.reporting.tensorboard import TensorBoard
    from seqlab.training.checkpoints import Checkpoints

    with Checkpoints(job.directory / "checkpoints", program.layout) as checkpoints:
        with refusals():
            states, seconds = start(program, results, checkpoints)
        first_step = int(states.step[0])
        with TensorBoard(output, first_step, [m["learning_rate"] for m in results["members"]]) as board:
            if not first_step:
                board.session_start(hyperparameters(job, results), group=job.name)
                board.text("config", first_step, f"```yaml\n{OmegaConf.to_yaml(job.config, resolve=True)}\n```")
            fitted = train(job, task, program, states, checkpoints, board, stop, seconds)
            add_training(results, fitted)
            add_tuning(results, task, fitted)
            if fitted.status != "interrupted":
                add_measures(results, job, task, fitted, stop)
                report(results, board, fitted.step)


def start(program: "Program", results: "Results", checkpoints: "Checkpoints") -> tuple["TrainState", float]:
    """The population at its newest checkpoint, or before its first step; and the seconds it has trained."""
    import jax

    seeds, rates = (np.array([member[name] for member in results["members"]]) for name in ("seed", "learning_rate"))
    restored = checkpoints.restore(jax.eval_shape(program.init, seeds, rates))
    if restored is None:
        return program.init(seeds, rates), 0.0
    say(f"resuming at step {int(restored[0].step[0]):,} of {program.steps:,}")
    return restored


def train(
    job: Job,
    task: "Task",
    program: "Program",
    states: "TrainState",
    checkpoints: "Checkpoints",
    board: "TensorBoard",
    stop: "StopRequest",
    seconds: float,
) -> "Fitted":
    from seqlab.reporting.progress import TrainingProgress
    from seqlab.training.fit import fit

    tokens = program.batch_size * task.length * len(states.step)
    with TrainingProgress(program.steps, task.main_metric, tokens, int(states.step[0])) as bar:

        def record(step: int, values: Mapping[str, np.ndarray]) -> None:
            board.scalars(step, values)
            board.flush()  # no checkpoint may know of a step that TensorBoard lacks
            bar.update(step, values)

        fitted = fit(program, task, states, schedule(job), checkpoints, record, stop, seconds)
    if fitted.status == "finished" and fitted.step < program.steps:
        say(f"every member is past train.target={job.config.train.target} at step {fitted.step:,}")
    if fitted.status == "interrupted":
        say(f"stopped at step {fitted.step:,} of {program.steps:,}; the same command goes on from there")
    return fitted


def schedule(job: Job) -> "Schedule":
    from seqlab.training.fit import Schedule

    return Schedule(**{key: job.config.train[key] for key in Schedule.__dataclass_fields__})


def show(results: "Results", signal: int | None = None) -> int:
    """Prints a summary; returns the exit code, which tells a sweep too that a signal came, however late."""
    from seqlab.reporting.progress import print_summary

    print_summary(results)
    return EXIT_CODES[results["status"]] if signal is None else SIGNALLED + signal


def opening_line(job: Job, results: "Results") -> str:
    size = results["cost"]
    state = "no token-by-token state" if size["state_bytes"] is None else f"{size['state_bytes']:,} state bytes"
    members = len(results["members"])
    return (
        f"{job.name}: {results['device']}, {members} member{'s' * (members > 1)}, {size['parameters']:,} parameters "
        f"and {state} each -> {job.directory}"
    )


def free_compiled_programs() -> None:
    """A loaded program holds memory maps, of which Linux gives a process 65,530: some hundred jobs of a sweep."""
    import jax

    jax.clear_caches()


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX was told of another place."""
    import jax
    from platformdirs import user_cache_path

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(user_cache_path("seqlab") / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


if __name__ == "__main__":
    main()
