r"""SIGTERM and SIGINT as a question the training asks, instead of a blow in the middle of a step.

Schedulers send SIGTERM some seconds before they kill, and a person presses Ctrl-C. The first of either only
sets a flag; the loop looks at it after every update and in every other phase, saves, and leaves. A second
one ends the process at once, which harms nothing, because no file is ever half there under its final name.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stopping_gracefully"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# A scheduler that asks kills some ten seconds later, and saving needs its share of them.
PATIENCE = 4.0


class StopRequest:
    r"""Whether the process has been asked to stop, and the exit code that says so."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        r"""0 while nobody asked; then 128 + the signal, as shells have it: SIGTERM 143, SIGINT 130."""
        return 128 + self.signal if self.signal else 0

    @property
    def pressing(self) -> bool:
        r"""Whether it was asked for some seconds ago: time to break off what can be broken off."""
        return self.signal is not None and time.monotonic() - self._since >= PATIENCE

    def leave(self) -> None:
        r"""Leave if asked to: for loops that have nothing to save.

        Raises:
            SystemExit: with `exit_code`, if a signal came.
        """
        if self:
            raise SystemExit(self.exit_code)

    # Preparing data and compiling are long calls into code that asks nobody. Nothing is lost there, so the
    # signal may strike as an exception, wherever Python is.
    @contextmanager
    def at_once(self) -> Iterator[None]:
        r"""In this block a signal raises `SystemExit` where it strikes: for phases with nothing to save."""
        before, self._at_once = self._at_once, True
        try:
            self.leave()
            yield
        finally:
            self._at_once = before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # No clean-up, no locks, no output: whatever hangs must not be able to hold up the second signal.
        if self.signal is not None:
            os._exit(128 + number)
        self.signal, self._since = signal.Signals(number), time.monotonic()
        if self._at_once:
            raise SystemExit(self.exit_code)


@contextmanager
def stopping_gracefully() -> Iterator[StopRequest]:
    r"""Turn the first SIGTERM or SIGINT in this block into a `StopRequest`; put the old handlers back.

    A signal that the process was started to ignore (`nohup`, a background job) stays ignored. Outside the
    main thread, where Python has no handlers, the request stays false.
    """
    request = StopRequest()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, request._receive)
    try:
        yield request
    finally:
        # A handler that was not installed from Python cannot be put back: the default stands in for it.
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
