"""Runs what a command line asks for: one job, or a sweep of them, here or where a Hydra launcher puts them.

Imports neither JAX nor anything that does, so that --help and refusals answer at once.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from seqlab.commandline import CONFIG_PATH, OK, Job, job_of, refusals, say, typed_words
from seqlab.outcome import Outcome, attempt, objective
from seqlab.sweep import Sweep


def launch(run: Callable[[Job], int]) -> int:
    """Composes what `sys.argv` asks for and calls `run` on each job; returns the worst exit code.

    Bad input gets one line on standard error, a bug its traceback; in a sweep the other jobs go on, and what went wrong
    is listed again at the end.
    """
    sweep, whole = start(run)
    sweep.report()
    return max(job.code for job in (*sweep.outcomes, whole))


def start(run: Callable[[Job], int]) -> tuple[Sweep, Outcome]:
    """The jobs with how each ended, and how the command as a whole did."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors arrive here and not as Hydra's own print-out
    sys.path.insert(0, str(Path.cwd()))  # where a user's own classes lie: a console script does not look there itself
    sweep = Sweep()

    def here(config: DictConfig) -> Outcome:
        typed = typed_words()
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            say(f"[{HydraConfig.get().job.num + 1}] {typed}")
        asked: list[Job] = []

        def call() -> int:
            with refusals():
                asked.append(job_of(config, typed))
            return run(asked[0])

        outcome = attempt(typed, call)
        if outcome.code == OK:
            score, higher_is_better = objective(asked[0].directory)
            outcome = replace(outcome, score=score, higher_is_better=higher_is_better)
        outcome = sweep.note(outcome)
        if outcome.code > 128:  # stopped by a signal: so is the sweep
            raise SystemExit(outcome.code)
        return outcome

    def compose_and_run() -> int:
        try:
            with refusals(), sweep.watched():
                hydra.main(version_base="1.3", config_path=CONFIG_PATH, config_name="config")(here)()
        except SystemExit as stop:
            if not sweep.outcomes:  # --help
                raise
            return int(stop.code or OK)
        return OK

    return sweep, attempt("", compose_and_run)
