"""The thread that notices a lost rank, without any rank: the other one's number is moved by hand."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from postil.training import watch as module
from postil.training.watch import Watch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A second becomes a hundredth, and the end of the process a number in a list."""
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    monkeypatch.setattr(module, "GRACE", 0.05)
    left: list[int] = []
    monkeypatch.setattr(module.os, "_exit", left.append)
    return left


class Alive:
    """Another rank's thread."""

    def __init__(self, store: HashStore, rank: int):
        self.store, self.rank, self.stop = store, rank, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.stop.wait(0.01):
            self.store.add(f"beat/{self.rank}", 1)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def until(true, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_silent_neighbour_ends_the_process_and_is_named(quick: list[int], capfd) -> None:
    words: list[str] = []
    with Watch(0, 2, HashStore(), words.append):
        until(lambda: quick)
    assert quick == [1]
    assert words == ["rank 1 does not answer; rank 0 cannot go on without it"]
    assert f"postil: {words[0]}" in capfd.readouterr().err


def test_a_living_neighbour_is_left_alone(quick: list[int]) -> None:
    store = HashStore()
    with Alive(store, 1), Watch(0, 2, store) as watch:
        until(lambda: store.add("beat/0", 0) > 3 * module.SILENCE)
        assert watch.who_was_lost() is None
    assert not quick


def test_in_doubt_it_looks_at_all_and_sooner(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's neighbour is rank 3, which lives; rank 1 is the one that is gone."""
    monkeypatch.setattr(module, "SILENCE", 10**9)
    monkeypatch.setattr(module, "GRACE", 20.0)
    store = HashStore()
    with Alive(store, 2), Alive(store, 3), Watch(0, 4, store) as watch:
        until(lambda: store.add("beat/0", 0) > 5)
        assert not quick
        lost = None
        until(lambda: watch.who_was_lost() is not None)
        lost = watch.who_was_lost()
    assert lost == "rank 1 does not answer; rank 0 cannot go on without it"
    assert not quick, "it left by itself in time"


def test_a_rank_that_lives_but_never_comes_is_named(quick: list[int]) -> None:
    """All gave up waiting, but for rank 2: it is stuck somewhere, and its thread goes on beating."""
    store = HashStore()
    store.set("waited/1", "")
    with Alive(store, 1), Alive(store, 2), Watch(0, 3, store) as watch:
        lost = watch.who_was_lost(timed_out=True)
    assert lost == (
        "rank 2 lives but did not come where the others waited for it; rank 0 cannot go on without it"
    )
    assert store.get("lost").decode() in lost


def test_nobody_is_blamed_where_all_waited(quick: list[int]) -> None:
    store = HashStore()
    store.set("waited/1", "")
    with Alive(store, 1), Watch(0, 2, store) as watch:
        assert watch.who_was_lost(timed_out=True) is None
    store = HashStore()
    with Alive(store, 1), Watch(0, 2, store) as watch:
        assert watch.who_was_lost() is None, "an error of our own is nobody else's fault"


def test_the_first_word_is_the_one_that_counts(quick: list[int]) -> None:
    store = HashStore()
    with pytest.raises(OSError, match="disk"), Alive(store, 0), Watch(1, 2, store):
        raise OSError("the disk is gone")
    with pytest.raises(KeyError), Watch(0, 2, store):
        raise KeyError("later")
    assert store.get("lost") == b"rank 1 failed: OSError: the disk is gone"
    words: list[str] = []
    with Watch(0, 2, store, words.append):
        until(lambda: quick)
    assert words[0].startswith("rank 1 failed: OSError: the disk is gone")


# Python ends a thread that is inside the store by unwinding it, and the store's C++ answers with an abort: a
# run that had made all its updates, on a busy machine, was seen to end with SIGABRT.
def test_nobody_leaves_in_the_middle_of_a_look(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 20.0)
    asked, answered = threading.Event(), threading.Event()

    class Slow(HashStore):
        def add(self, key: str, by: int) -> int:
            asked.set()
            time.sleep(0.3)
            answered.set()
            return super().add(key, by)

    with Watch(0, 2, Slow()):
        assert asked.wait(20)
    assert answered.is_set() and not quick
