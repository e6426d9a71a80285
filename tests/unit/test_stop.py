"""A signal asks for a stop; only a second Ctrl-C insists."""

import os
import signal
import threading

import pytest

from equipoise.train.stop import StoppedBySignal, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_interrupts_nothing(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.requested == 0
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        assert stop.requested == number
    with pytest.raises(StoppedBySignal) as caught:
        stop.raise_if_requested()
    assert caught.value.signal_number == number


def test_repeated_sigterm_does_not_cut_the_saving_short() -> None:
    with StopSignals() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == signal.SIGTERM


def test_a_second_ctrl_c_interrupts() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_outer_instance_hears_what_an_inner_one_caught() -> None:
    with StopSignals() as outer:
        with StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (inner.requested, outer.requested) == (signal.SIGTERM, signal.SIGTERM)


def test_an_inner_instance_takes_over_what_an_outer_one_heard_before() -> None:
    with StopSignals() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with StopSignals() as inner:
            assert inner.requested == outer.requested == signal.SIGTERM


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_it_changes_nothing() -> None:
    found = []

    def enter() -> None:
        with StopSignals() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [0]
