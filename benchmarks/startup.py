"""How long it takes from typing a command to its first step, and how much of that the compilation cache saves."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.timing import Goal, ratios

COMMAND = ("model=ssm", "train.chunk=1")
UNTIL_FIRST_STEP = """
import os
from seqlab.reporting.progress import TrainingProgress
TrainingProgress.update = lambda *_: os._exit(0)
from seqlab.run import main
main()
"""


def second_start(rounds: int) -> list[Table]:
    """The same command twice a round, the first time with an empty cache: wall time and processor time."""
    rounds = min(rounds, 3)
    wall, processor = ({name: np.zeros(rounds) for name in ("first start", "second start")} for _ in range(2))
    for i in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            for start in wall:
                wall[start][i], processor[start][i] = _time_to_first_step(Path(directory), start)
    goal = Goal("second start", 0.4)
    command = f"python -m seqlab.run {COMMAND[0]}"
    return [
        ratios(f"From `{command}` to its first step, wall time", wall, goal),
        ratios(f"From `{command}` to its first step, processor time", processor, goal),
    ]


def _time_to_first_step(directory: Path, start: str) -> tuple[float, float]:
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(directory / "cache")}
    command = [sys.executable, "-c", UNTIL_FIRST_STEP, *COMMAND, f"runs={directory / start}"]
    before, used = time.perf_counter(), _processor_seconds()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - before, _processor_seconds() - used


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
