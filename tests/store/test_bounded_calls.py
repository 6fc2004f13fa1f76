"""Calls with an end: what cannot even be begun takes no place."""

import threading

import pytest

from prolepsis.errors import TierError
from prolepsis.store.bounded_calls import BoundedCalls


def test_a_thread_that_cannot_be_started_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    call = BoundedCalls("remote", 5, most=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(TierError, match="can't start new thread"):
            call(len, "abc")
    assert call(len, "abc") == 3
