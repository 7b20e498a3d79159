"""How a run is stopped from outside: Ctrl-C and SIGTERM leave a note, which is looked at where it is safe to stop."""

import os
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """A signal asked the process to end while nothing was being trained."""


class StopRequest:
    """Where it is entered, the first Ctrl-C or SIGTERM only leaves its number in `signal`. A second one meets the
    handlers of before, which end the process.

    Nothing is raised from the handler: it may be called within a finaliser, where Python drops exceptions.
    """

    def __init__(self):
        self.signal: int | None = None
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self) -> None:
        """Raises StoppedError where a signal has come."""
        if self.signal is not None:
            raise StoppedError(f"stopped by signal {self.signal}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
        # not `print`, which may be what the signal interrupted
        os.write(2, b"stopping with a checkpoint; once more stops at once\n")
