"""How a run is stopped from outside: Ctrl-C and SIGTERM, as an exception at once or held back to the end of a chunk."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(BaseException):
    """A signal asked the process to end. No Exception: whoever guards against failures must not take it for one."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class StopRequest:
    """Where it is entered, the first Ctrl-C or SIGTERM raises StoppedError; within `held()` it only leaves its number
    in `signal`, for a loop that looks there. A second one meets the handlers of before, which end the process.
    """

    def __init__(self):
        self.signal: int | None = None
        self._held = False
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
        if not self._held:
            raise StoppedError(number)
        # not `print`, which may be what the signal interrupted
        os.write(2, b"stopping with a checkpoint; once more stops at once\n")
