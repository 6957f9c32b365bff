"""Turns of test processes: an ordinary one is shared, one that is alone is not."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

from helpers.patience import PATIENCE_S, until
from helpers.turns import Turns


def test_who_is_alone_waits_for_those_before_and_is_not_passed_by_those_after(
    tmp_path: Path,
) -> None:
    order: list[str] = []

    def take(name: str, alone: bool) -> None:
        turns = Turns(tmp_path)  # files of its own, as in a process of its own
        with turns.take(alone):
            order.append(f"{name} begins")
            time.sleep(0.02)
            order.append(f"{name} ends")
        turns.close()

    first = Turns(tmp_path)
    early = threading.Thread(target=take, args=("early", False))
    late = threading.Thread(target=take, args=("late", False))
    lone = threading.Thread(target=take, args=("lone", True))
    with first.take(alone=False):
        early.start()
        early.join(PATIENCE_S)
        assert order == ["early begins", "early ends"], "ordinary turns are not shared"
        order.clear()
        lone.start()
        with (tmp_path / "gate").open() as gate:
            until(lambda: is_locked(gate.fileno()))
        late.start()
        time.sleep(0.05)
        assert order == []
    for thread in (lone, late):
        thread.join(PATIENCE_S)
    assert order == ["lone begins", "lone ends", "late begins", "late ends"]
    first.close()


def is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
