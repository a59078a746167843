import threading

import pytest

from recsys.serving.stores.breaker import Breaker, Watch
from recsys.testing import PATIENCE_S


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_calls_are_refused_until_one_works(clock):
    breaker = Breaker(1.0, clock=clock)
    assert [breaker.enter(), breaker.enter()] == [True, True]
    breaker.failed()
    breaker.leave()
    assert not breaker.enter()
    clock.now = 1.0
    assert [breaker.enter(), breaker.enter()] == [True, False]  # one tries
    breaker.failed()
    breaker.leave()
    assert not breaker.enter()
    clock.now = 2.0
    assert breaker.enter()
    breaker.worked()
    assert [breaker.enter(), breaker.enter()] == [True, True]


def test_a_try_without_an_outcome_lets_another_one_try(clock):
    breaker = Breaker(1.0, clock=clock)
    breaker.failed()
    clock.now = 1.0
    assert breaker.enter()
    breaker.leave()
    assert breaker.enter()


def test_a_call_that_takes_too_long_is_ended():
    ended = threading.Event()
    found = []
    watch = Watch(0.05, lambda connection: (found.append(connection), ended.set()))
    watch.begin("quick")
    watch.finish()
    watch.begin("hangs")
    assert ended.wait(PATIENCE_S)
    watch.finish()
    watch.close()
    assert found == ["hangs"]
