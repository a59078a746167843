"""Lines of progress without a terminal, by a clock that the tests move."""

import threading
import time

import pytest
from oracles import PATIENCE_S

from recsys import progress
from recsys.progress import LINE_EVERY_S, Heartbeat, say, track, working


@pytest.fixture
def clock(clock, monkeypatch):
    clock.now = 500.0
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(progress, "_shown", progress._Shown())
    monkeypatch.setattr(progress.console, "_force_terminal", False)
    return clock


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def begun(name):
    """Work without its thread."""
    progress._shown.working.append(Heartbeat(name))
    return progress._shown.working[-1]


def passed(clock, heartbeat, seconds):
    """Let time pass, a second at a time."""
    for _ in range(seconds):
        clock.now += 1
        heartbeat.beat()


def test_work_without_a_word_is_heard_of_within_ten_seconds(clock, capsys):
    heartbeat = begun("ids")
    passed(clock, heartbeat, 30)
    assert lines(capsys) == [f"ids: at work for {n} s" for n in (6, 12, 18, 24, 30)]


def test_a_line_of_the_work_itself_puts_the_next_one_off(clock, capsys):
    heartbeat = begun("ids")
    passed(clock, heartbeat, 5)
    say("something")
    passed(clock, heartbeat, 6)
    assert lines(capsys) == ["something", "ids: at work for 11 s"]


def test_the_heartbeat_shows_the_bar_that_is_open(clock, capsys):
    heartbeat = begun("target")
    with track("labels", 40) as bar:
        clock.now += 2
        bar.advance(10, loss=1.5)
        passed(clock, heartbeat, 4)
        assert lines(capsys) == ["labels: 10/40 ETA 18 s loss 1.5"]
    passed(clock, heartbeat, 6)
    assert lines(capsys) == ["target: at work for 12 s"]


def test_a_bar_writes_by_itself_where_nothing_else_does(clock, capsys):
    with track("users", 3) as bar:
        for _ in range(3):
            clock.now += LINE_EVERY_S
            bar.advance()
    assert lines(capsys) == ["users: 1/3 ETA 12 s", "users: 2/3 ETA 6 s", "users: 3/3 ETA 0 s"]


def test_the_thread_ends_with_the_work_even_if_that_fails(monkeypatch):
    beaten = threading.Event()
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(Heartbeat, "beat", lambda self: beaten.set())

    def fail():
        with working("ids"):
            assert beaten.wait(PATIENCE_S)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
