"""Trains a population of one model on one task, measures it and records it: `python -m seqlab.run model=ssm task=mqar`.

compose -> train -> measure -> report. JAX is imported only once there is something to compute.
"""

import shutil
import sys
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf

from seqlab.commandline import DIVERGED, NOT_PART_OF_THE_RUN, OK, Job, RefusedError, launch, leaves, refusals, say

if TYPE_CHECKING:
    from seqlab.reporting.results import Results
    from seqlab.reporting.tensorboard import TensorBoard
    from seqlab.tasks.base import Task
    from seqlab.training.checkpoints import Checkpoints
    from seqlab.training.fit import Fitted, Schedule
    from seqlab.training.program import Program, TrainState

CONFIG_FILE = "config.yaml"
DATA = "data_digest"
"""In the saved configuration: which text it was."""
SIGNALLED = 128  # an exit code of 128 + n says that signal n ended the process
EXIT_CODES = {"finished": OK, "diverged": DIVERGED}


def main() -> None:
    sys.exit(launch(run))


def run(job: Job) -> int:
    """One run, from its start or its last checkpoint to its results; returns the exit code."""
    from seqlab.reporting.results import read_results

    with refusals():
        check_directory(job)
        before = None
        if (job.directory / "results.json").exists() and not job.config.overwrite:
            before = read_results(job.directory)
    if before is not None and before["status"] in EXIT_CODES:
        say(f"{job.directory} is {before['status']} already; overwrite=true starts it anew")
        return show(before)

    use_compilation_cache()
    from seqlab.record import blank_results

    with refusals():
        task, program = build(job)
        results = blank_results(job, task, program)
        prepare_directory(job, task)
    try:
        return show(*train_and_measure(job, task, program, results))
    finally:
        free_compiled_programs()


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
    )
    try:
        causal = program.abstract_model.causal
    except TypeError as error:  # an argument that a constructor does not know
        raise ValueError(f"model={job.choices['model']} cannot be built: {error}") from error
    task = task.asked_of(causal)
    for length in (task.length, *getattr(task, "eval_lengths", ())):
        program.abstract_model.position.admit(length)
    schedule(job)
    for measure in map(instantiate, config.measure.values()):
        if not isinstance(task, measure.task_type):
            chosen = f"measure={job.choices['measure']}"
            raise ValueError(f"{chosen} looks at {measure.task_type.__name__}, not at task={job.choices['task']}")
    return task, program


def resolved(job: Job) -> DictConfig:
    """What the run is made of, with every interpolation filled in."""
    config = OmegaConf.masked_copy(job.config, [str(key) for key in job.config if key not in NOT_PART_OF_THE_RUN])
    OmegaConf.resolve(config)
    return config


def check_directory(job: Job) -> None:
    """Raises ValueError where the run's directory holds a run of another configuration."""
    file = job.directory / CONFIG_FILE
    if set("[]*?") & set(str(job.directory.absolute())):  # Orbax would take it for a pattern and lose the checkpoint
        raise ValueError(f"{job.directory.absolute()} has one of []*? in it, with which no checkpoint can be kept")
    if job.config.overwrite or not file.exists():
        return
    before, now = (dict(leaves(OmegaConf.to_container(tree))) for tree in (OmegaConf.load(file), resolved(job)))
    before.pop(DATA, None)
    changed = [f"{k} was {before.get(k)} and is {now.get(k)}" for k in {**before, **now} if before.get(k) != now.get(k)]
    if changed:
        raise ValueError(f"{job.directory} was made with another config ({'; '.join(changed)}); use overwrite=true")


def prepare_directory(job: Job, task: "Task") -> None:
    """Makes the run's directory, empty where it is to be overwritten.

    Raises:
        ValueError: it cannot be written, or holds a run on other data.
    """
    file = job.directory / CONFIG_FILE
    config = resolved(job)
    config[DATA] = digest(task)
    if file.exists() and not job.config.overwrite and OmegaConf.select(OmegaConf.load(file), DATA) != config[DATA]:
        raise ValueError(f"{job.directory} was trained on other data than its task holds now; use overwrite=true")
    try:
        if job.config.overwrite and job.directory.exists():
            shutil.rmtree(job.directory)
        job.directory.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            unfinished = file.with_suffix(".tmp")
            OmegaConf.save(config, unfinished)
            unfinished.replace(file)  # whole or not at all
    except OSError as error:
        where = f"runs={job.config.runs}: {error.filename} cannot be written ({error.strerror})"
        raise ValueError(f"{where}; use runs=DIRECTORY that can") from error


def digest(task: "Task") -> str | None:
    """What tells the data that a task holds (a text) from others; None for a task that makes its own."""
    import jax

    held = jax.tree.leaves(task)
    if not held:
        return None
    parts = [repr(task.vocab.words).encode(), *(np.asarray(array).tobytes() for array in held)]
    return sha256(b"".join(parts)).hexdigest()[:16]


def train_and_measure(job: Job, task: "Task", program: "Program", results: "Results") -> tuple["Results", int | None]:
    """The run proper: its results, which are on disk however it ends, and the signal that stopped it, if one did."""
    from seqlab.record import add_measures, add_training, hyperparameters, report
    from seqlab.reporting.results import write_results
    from seqlab.reporting.tensorboard import TensorBoard
    from seqlab.training.checkpoints import Checkpoints

    say(opening_line(job, results))
    try:
        with Checkpoints(job.directory / "checkpoints") as checkpoints:
            with refusals():
                states, seconds = start(program, results, checkpoints)
            first_step = int(states.step[0])
            with TensorBoard(job.directory, first_step) as board:
                board.session_start(hyperparameters(job, results), group=job.name)
                board.text("config", first_step, f"```yaml\n{OmegaConf.to_yaml(job.config, resolve=True)}\n```")
                fitted = train(job, task, program, states, checkpoints, board, seconds)
                add_training(results, fitted)
                if fitted.status != "interrupted":
                    add_measures(results, job, task, program, fitted)
                report(results, board, fitted.step)
    except RefusedError:
        raise
    except Exception:
        write_results(job.directory, results | {"status": "failed"})
        raise
    write_results(job.directory, results)
    return results, fitted.signal


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
    seconds: float,
) -> "Fitted":
    from seqlab.reporting.progress import TrainingProgress
    from seqlab.training.fit import fit

    tokens = program.batch_size * task.length * len(states.step)
    with TrainingProgress(program.steps, task.main_metric, tokens, int(states.step[0])) as bar:

        def record(step: int, values: Mapping[str, np.ndarray]) -> None:
            board.scalars(step, values)
            bar.update(step, values)

        fitted = fit(program, task, states, schedule(job), checkpoints, record, seconds)
    if fitted.status == "finished" and fitted.step < program.steps:
        say(f"every member is past train.target={job.config.train.target} at step {fitted.step:,}")
    if fitted.status == "interrupted":
        say(f"stopped at step {fitted.step:,} of {program.steps:,}; the same command goes on from there")
    return fitted


def schedule(job: Job) -> "Schedule":
    from seqlab.training.fit import Schedule

    return Schedule(**{key: job.config.train[key] for key in Schedule.__dataclass_fields__})


def show(results: "Results", signal: int | None = None) -> int:
    """Prints a summary; returns the exit code."""
    from seqlab.reporting.progress import print_summary

    print_summary(results)
    return EXIT_CODES.get(results["status"], SIGNALLED + (signal or 0))


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
