"""How storing gives way to an engine at work, and when it does not."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prolepsis.coding.threads import pause
from prolepsis.engine.store_writer import StoreWriter

PATIENCE_S = 60.0


def _work() -> None:
    """As long as any slice."""
    begin = time.thread_time()
    while time.thread_time() - begin < 1e-3:
        pass


class Store:
    """Takes two slices for each segment, and waits for `go_on` in the first."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.stored = threading.Semaphore(0)
        self.count = SimpleNamespace(add=lambda **_: None)

    def names(self, tokens: list[int], _: str) -> list[Any]:
        return [SimpleNamespace(start=0, stop=len(tokens), key="kv")]

    def located(self, _: object) -> None:
        return None

    def used(self, _: object) -> None:
        pass

    def put(self, *_: object) -> object:
        _work()
        self.begun.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
        pause()
        _work()
        pause()
        self.stored.release()
        return object()


def _copied(_: object) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(np.zeros((1, 2, 16, 1, 2), np.uint16))
    return future


def test_a_moment_without_work_is_enough_to_end_a_segment_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a duty that would make it sleep for months after each slice."""
    monkeypatch.setattr("prolepsis.engine.store_writer.DUTY", 1e-10)
    store = Store()
    writer = StoreWriter(store, SimpleNamespace(block_size=16), None, _copied)  # type: ignore[arg-type]
    for _ in range(2):
        writer.add([1] * 16, "")
    assert store.begun.acquire(timeout=PATIENCE_S)
    writer.set_idle(True)
    writer.set_idle(False)
    store.go_on.release(2)
    assert store.stored.acquire(timeout=PATIENCE_S)
    assert store.begun.acquire(timeout=PATIENCE_S)
    assert not store.stored.acquire(timeout=0.05)  # it sleeps
    writer.close()
    assert store.stored.acquire(timeout=PATIENCE_S)
    writer.join()
