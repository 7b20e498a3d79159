"""How a job ended: its exit code, why, and what it scored on the validation split."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqlab.commandline import DIVERGED, FAILED, OK, REFUSED, RefusedError, one_line, say


@dataclass(frozen=True)
class Outcome:
    typed: str
    code: int
    reason: str = ""
    """Why the code is not 0."""
    score: float | None = None
    """On the validation split, never on the reported one; None where there is none."""
    higher_is_better: bool = True

    def __float__(self) -> float:
        """What a sweeper minimises: infinite where a job failed or has no score."""
        if self.code != OK or self.score is None:
            return float("inf")
        return -self.score if self.higher_is_better else self.score


def attempt(typed: str, call: Callable[[], int]) -> Outcome:
    """What comes of a call that returns an exit code. Bad input is said in one line, a bug with its traceback."""
    try:
        code = call()
    except RefusedError as refused:
        say(f"seqlab: {refused}")
        return Outcome(typed, REFUSED, str(refused))
    except KeyboardInterrupt:  # while compiling or measuring; training itself ends with a checkpoint
        say("seqlab: stopped by Ctrl-C; the same command goes on from the last checkpoint")
        code = 130
    except OSError as error:  # a disk that is full, a directory that went away
        say(f"seqlab: {one_line(error)}")
        return Outcome(typed, FAILED, one_line(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome(typed, FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
    reasons = {OK: "", DIVERGED: "every member diverged"}
    return Outcome(typed, code, reasons.get(code, f"stopped by signal {code - 128}"))


def objective(directory: Path) -> tuple[float | None, bool]:
    """The validation score of a finished run, and whether higher is better; None where its results have none."""
    file = directory / "results.json"
    tuning = (json.loads(file.read_text()).get("tuning") if file.exists() else None) or {}
    return tuning.get("score"), tuning.get("higher_is_better", True)
