"""A sweep whose jobs run elsewhere: each as a process of its own, wherever joblib, submitit or Ray start it.

So a job that is killed takes no other with it, XLA's threads are its own, and it is the command that one would type.
The sweep holds a lock, its lifeline: when it is let go, what still runs of the sweep ends.
"""

import fcntl
import json
import logging
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from threading import Thread
from typing import IO, Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seqlab.commandline import FAILED, OK, REFUSED, RefusedError, say, typed_words
from seqlab.outcome import Outcome

NO_PLUGIN = re.compile(r"Could not (?:find|load) 'hydra/(?:launcher|sweeper)/(joblib|submitit|ray|optuna)")


@dataclass
class Sweep:
    """The jobs of one command line, and how each ended."""

    outcomes: list[Outcome] = field(default_factory=list)
    optimised: bool = False
    """A sweeper chooses each job by what others scored."""

    def note(self, outcome: Outcome) -> Outcome:
        if self.optimised and outcome.code == OK and outcome.score is None:
            reason = "results.json has no tuning.score, by which a sweeper could compare; overwrite=true measures it"
            outcome = replace(outcome, code=REFUSED, reason=reason)
        self.outcomes.append(outcome)
        return outcome

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, launchers other than Hydra's basic one start each job as a process of its own.

        Every sweeper gets its launcher from `Plugins.instantiate_launcher`, and not every sweeper returns what the
        launcher did: so here is the one place where the outcomes can be had.
        """
        plugins = Plugins.instance()
        launcher_of = plugins.instantiate_launcher
        with ExitStack() as held:

            def instantiate(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
                directory = Path(config.hydra.sweep.dir)
                if not directory.exists():
                    held.callback(self._tidy, directory)
                self.optimised = not config.hydra.sweeper._target_.endswith(".BasicSweeper")
                logging.getLogger("optuna").setLevel(logging.WARNING)
                if config.hydra.launcher._target_.endswith(".BasicLauncher"):
                    return launcher_of(hydra_context=hydra_context, task_function=task_function, config=config)
                lifeline = held.enter_context(_held_lifeline())
                job = Apart(_options(), os.getcwd(), platform.node(), lifeline.name)
                launcher = launcher_of(hydra_context=hydra_context, task_function=job, config=config)
                return Elsewhere(launcher, self, lifeline)

            vars(plugins)["instantiate_launcher"] = instantiate
            try:
                yield
            except HydraException as error:
                missing = NO_PLUGIN.search(str(error))
                if missing is None:
                    raise
                raise RefusedError(f"{missing[1]} is not installed; pip install 'seqlab[{missing[1]}]'") from error
            finally:
                del vars(plugins)["instantiate_launcher"]

    def _tidy(self, directory: Path) -> None:
        """Where nothing but refusals came of it, takes away what Hydra notes before it starts."""
        if all(job.code == REFUSED for job in self.outcomes):
            with suppress(OSError):
                (directory / "multirun.yaml").unlink()
                directory.rmdir()

    def report(self) -> None:
        """Says at the end of several jobs how many finished, what became of the others, and which was the best."""
        if len(self.outcomes) < 2:
            return
        bad = [job for job in self.outcomes if job.code != OK]
        say(f"{len(self.outcomes) - len(bad)} of {len(self.outcomes)} runs finished")
        for job in bad:
            say(f"  {job.typed}: {job.reason}")
        if self.optimised and len(bad) < len(self.outcomes):
            best = min(self.outcomes, key=float)
            say(f"best on the validation split: {best.typed} ({best.score:.4g})")


def _options() -> tuple[str, ...]:
    directory = get_args_parser().parse_args().config_dir
    return ("--config-dir", directory) if directory else ()


@contextmanager
def _held_lifeline() -> Iterator[IO[bytes]]:
    with NamedTemporaryFile(prefix="seqlab-sweep-") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


class Elsewhere(Launcher):
    """A launcher that notes how the jobs of another ended, and lets them stop in order on Ctrl-C and SIGTERM."""

    def __init__(self, launcher: Launcher, sweep: Sweep, lifeline: IO[bytes]):
        self._launcher, self._sweep, self._lifeline = launcher, sweep, lifeline

    def setup(self, **words: Any) -> None:
        self._launcher.setup(**words)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with self._stoppable() as stopped:
            try:
                returns = self._launcher.launch(job_overrides, initial_job_idx)
            except (HydraException, OmegaConfBaseException):  # what was typed does not compose
                raise
            except Exception as error:  # a worker was killed, a queue refused: not a job's own failure
                returns = [JobReturn(status=JobStatus.FAILED, _return_value=error) for _ in job_overrides]
        for words, job in zip(job_overrides, returns, strict=True):
            outcome = job._return_value
            if not isinstance(outcome, Outcome):
                reason = f"{type(outcome).__name__}: {str(outcome).strip()}".splitlines()[0]
                outcome = Outcome(shlex.join(filter_overrides(words)), FAILED, reason)
            job.status, job.return_value = JobStatus.COMPLETED, self._sweep.note(outcome)
        if stopped:
            raise SystemExit(128 + stopped[0])
        return returns

    @contextmanager
    def _stoppable(self) -> Iterator[list[int]]:
        """Holds the first signal until the jobs have stopped; a second one is not held."""
        stopped: list[int] = []

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def note(number: int, frame: Any) -> None:
            say("stopping the jobs, each with a checkpoint; once more stops at once")
            stopped.append(number)
            self._lifeline.write(bytes([number]))
            self._lifeline.flush()
            restore()

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield stopped
        finally:
            restore()


@dataclass(frozen=True)
class Apart:
    """Called in a launcher's worker: runs a job as a process of its own and says what came of it; never raises."""

    options: tuple[str, ...]
    directory: str
    machine: str
    """The sweep's, where its lifeline lies."""
    lifeline: str

    def __call__(self, config: DictConfig) -> Outcome:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the sweep says what to do
        typed = typed_words()
        number = f"[{HydraConfig.get().job.num + 1}]"
        stopped = self._stopped()
        if stopped:
            return Outcome(typed, 128 + stopped, "not started")
        say(f"{number} {typed}")
        with TemporaryDirectory() as directory:
            answer = Path(directory, "outcome.json")
            words = [str(answer), self.machine, self.lifeline, *self.options, *shlex.split(typed)]
            done = subprocess.run(
                [sys.executable, "-m", __name__, *words],
                cwd=self.directory,
                # XLA's CPU client makes as many threads as NPROC says
                env=os.environ | {"NPROC": str(threads(HydraConfig.get().launcher)), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            if answer.exists():
                outcome = Outcome(**json.loads(answer.read_text()))
            elif done.returncode < 0:
                name = signal.strsignal(-done.returncode)
                outcome = Outcome(typed, 128 - done.returncode, f"killed by signal {-done.returncode} ({name})")
            else:
                outcome = Outcome(typed, done.returncode or FAILED, "ended without a word")
        if self._stopped() == signal.SIGKILL:  # nobody waits for this worker
            os._exit(FAILED)
        say(f"{number} {typed}: {outcome.reason or 'finished'}\n{done.stdout}".rstrip())  # at once, so not interleaved
        return outcome

    def _stopped(self) -> int:
        """The signal that ended the sweep, 0 while it lives; of a sweep on another machine this is not known."""
        if self.machine != platform.node():
            return 0
        try:
            with open(self.lifeline, "rb") as file:
                return _signal_in(file) if _is_held(file) else signal.SIGKILL
        except FileNotFoundError:
            return signal.SIGKILL


def threads(launcher: DictConfig) -> int:
    """How many XLA may use in each job: what the launcher reserves for it, or its share of this machine's cores."""
    if "n_jobs" in launcher:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // launcher.n_jobs) if launcher.n_jobs > 0 else 1
    return int(launcher.get("cpus_per_task") or OmegaConf.select(launcher, "ray.remote.num_cpus") or 1)


def main() -> None:
    """One job of a sweep: `python -m seqlab.sweep ANSWER MACHINE LIFELINE WORD...`"""
    answer, machine, lifeline, *words = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the worker ignores, and Ray blocks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if machine == platform.node():
        Thread(target=_watch, args=(Path(lifeline), os.getppid()), daemon=True).start()
    from seqlab.launch import start
    from seqlab.run import run

    sys.argv[1:] = words
    job, whole = start(run)
    outcome = next(iter(job.outcomes), whole)
    unfinished = Path(answer).with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(outcome)))
    unfinished.replace(answer)
    sys.exit(outcome.code)


def _watch(lifeline: Path, worker: int) -> None:
    """Passes on to this process what stops its sweep; ends it at once when the sweep or the worker are no more."""
    passed_on = False
    with suppress(FileNotFoundError), lifeline.open("rb") as file:
        while os.getppid() == worker and _is_held(file):
            number = _signal_in(file)
            if number and not passed_on:
                os.kill(os.getpid(), number)
                passed_on = True
            time.sleep(0.2)
    os._exit(128 + signal.SIGKILL)


def _is_held(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _signal_in(file: IO[bytes]) -> int:
    return int.from_bytes(os.pread(file.fileno(), 1, 0))


if __name__ == "__main__":
    main()
