"""Locks between processes: one holder at a time, and none that is dead."""

import errno
import os
import signal
import threading

import pytest
from oracles import PATIENCE_S

from recsys.artifacts import Workspace
from recsys.errors import LockedError
from recsys.locks import lock_file, locked


def test_a_path_is_used_by_one_at_a_time(tmp_path, forked):
    def second(path):
        with pytest.raises(LockedError, match="a is in use by another process; choose another"):
            locked(path, way_out="choose another").__enter__()

    with locked(tmp_path / "a"):
        assert forked(second, tmp_path / "a") == 0
        with locked(tmp_path / "b"):
            pass
    with locked(tmp_path / "a"):
        pass
    assert not list(tmp_path.iterdir())


def die_with_the_lock(path):
    with locked(path):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_holds_no_lock(tmp_path, forked):
    assert forked(die_with_the_lock, tmp_path / "a") == -signal.SIGKILL
    assert lock_file(tmp_path / "a").exists()
    with locked(tmp_path / "a"):
        pass
    assert not lock_file(tmp_path / "a").exists()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="no locks here"):
        locked(tmp_path / "a").__enter__()


def test_a_forked_child_does_not_prolong_a_lock(tmp_path):
    receiving, sending = os.pipe()
    with locked(tmp_path / "a"):
        child = os.fork()
        if child == 0:
            os.read(receiving, 1)
            os._exit(0)
    try:
        with locked(tmp_path / "a"):
            pass
    finally:
        os.write(sending, b"x")
        os.waitpid(child, 0)
        os.close(receiving)
        os.close(sending)


def test_waiters_take_turns(tmp_path):
    file = tmp_path / "count"
    file.write_text("0")

    def work():
        for _ in range(25):
            with locked(file, wait_s=PATIENCE_S):
                file.write_text(str(int(file.read_text()) + 1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() == "100"


def test_a_second_run_of_a_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    one, other = Workspace(tmp_path, "one"), Workspace(tmp_path, "other")
    with one.locked(), other.locked():
        with pytest.raises(LockedError, match=r"one is in use by .*; .* choose another --name"):
            one.locked().__enter__()
        monkeypatch.setenv("RANK", "1")  # of the same run
        with one.locked():
            pass
