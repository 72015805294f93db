r"""Every process watches its neighbour, so that a lost one is noticed and named.

When a process of a training dies, the others see a broken connection, and when it hangs they see nothing at
all until an operation takes too long. Neither says which process it was. So a thread in each of them counts
up a number at the common meeting point, once a second, and looks whether the number of its neighbour moves.
Two numbers a second for each process are no load even for thousands of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["Watch"]

INTERVAL = 1.0
SILENCE = 30
"""Looks, one an interval, in which a neighbour may be silent. A busy machine starves a thread for seconds."""
SILENCE_IN_DOUBT = 4
"""The same when a connection broke, so that somebody is certainly gone."""
GRACE = 5.0


class Watch:
    r"""A thread from entering the block to leaving it; if another rank is lost, it ends this process.

    `store` must be a connection of its own, since the training may be blocked in the process group's.
    `last_words` is called with the message before the process ends.

    Looks are counted and not seconds: a laptop that slept, or a whole job that was stopped and continued,
    would otherwise find everybody silent for hours.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        last_words: Callable[[str], None] = lambda message: None,
    ):
        self.rank, self.world, self._store, self._last_words = rank, world, store, last_words
        self._parent = int(os.environ.get("POSTIL_STARTED_BY", 0))
        self._left = threading.Event()
        self._found = threading.Event()
        self._in_doubt = False
        self._message = ""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._found.is_set():
            self._tell(f"rank {self.rank} failed: {type(error).__name__}: {error}")
        self._left.set()
        # A thread that is still asking the store when Python ends takes the process with it, by an abort.
        self._thread.join(GRACE)

    # The broken connection is noticed within a moment, and by all at once. Who is to blame takes a few
    # seconds of looking. A rank may also live and yet never come, stuck in a call of its own: then all give
    # up waiting, and it alone does not.
    def who_was_lost(self, timed_out: bool = False) -> str | None:
        r"""After an operation between processes failed: name the one that is gone, or give `None`.

        With `timed_out`, one that lives counts as gone if it has not given up waiting too.
        """
        self._in_doubt = True
        if timed_out:
            self._store.set(f"waited/{self.rank}", "")
        if self._found.wait((SILENCE_IN_DOUBT + 4) * INTERVAL) or not timed_out:
            return self._message or None
        stuck = [rank for rank in range(self.world) if not self._store.check([f"waited/{rank}"])]
        if not stuck:
            return None
        self._tell(f"rank {stuck[0]} lives but did not come where the others waited for it")
        return f"{self._store.get('lost').decode()}; rank {self.rank} cannot go on without it"

    def _run(self) -> None:
        seen: dict[int, tuple[int, int]] = {}
        while not self._left.wait(INTERVAL):
            try:
                message = self._look(seen)
            except Exception as error:
                message = f"the process that keeps the meeting point is gone ({type(error).__name__})"
            # Whoever started us may be gone too, and then nobody is left to end us.
            if self._parent and os.getppid() != self._parent:
                message = "the process that started this one has ended"
            if message:
                self._end(message)
                return

    def _look(self, seen: dict[int, tuple[int, int]]) -> str:
        self._store.add(f"beat/{self.rank}", 1)
        if self._store.check(["lost"]):
            return self._store.get("lost").decode()
        others = [(self.rank - 1) % self.world]
        if self._in_doubt:
            others = [rank for rank in range(self.world) if rank != self.rank]
        limit = SILENCE_IN_DOUBT if self._in_doubt else SILENCE
        for rank in others:
            beat = self._store.add(f"beat/{rank}", 0)
            before, silent = seen.get(rank, (beat, 0))
            silent = silent + 1 if beat == before else 0
            seen[rank] = beat, silent
            if silent >= limit:
                self._tell(f"rank {rank} does not answer")
                return self._store.get("lost").decode()
        return ""

    # Whoever is first is right: after the first loss the others fall one after the other.
    def _tell(self, message: str) -> None:
        try:
            self._store.compare_set("lost", "", message)
        except Exception:
            return

    # A thread blocked in an operation between processes hears no exception. If it has not come back by
    # itself, and raised its own error, the process ends here. Nothing is lost by that: no file is ever half
    # there under its final name.
    def _end(self, message: str) -> None:
        self._message = f"{message}; rank {self.rank} cannot go on without it"
        self._found.set()
        if self._left.wait(GRACE):
            return
        self._last_words(self._message)
        print(f"postil: {self._message}", file=sys.stderr, flush=True)
        time.sleep(0.1)
        os._exit(1)
