import os
import signal
import subprocess
import sys
import threading

import pytest

from postil.training.signals import stopping_gracefully

BOTH = pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])


@BOTH
def test_the_first_signal_is_a_flag_and_the_handlers_come_back(number, code):
    before = signal.getsignal(number)
    with stopping_gracefully() as stop:
        assert not stop and stop.exit_code == 0
        stop.leave()
        signal.raise_signal(number)
        assert stop and stop.exit_code == code and stop.signal == number
        with pytest.raises(SystemExit) as left:
            stop.leave()
        assert left.value.code == code
    assert signal.getsignal(number) is before


@BOTH
def test_with_nothing_to_save_it_strikes_at_once(number, code):
    with stopping_gracefully() as stop:
        with pytest.raises(SystemExit) as left, stop.at_once():
            signal.raise_signal(number)
            raise AssertionError("went on")
        assert left.value.code == code
        with pytest.raises(SystemExit), stop.at_once():
            raise AssertionError("went in")


def run(code, *signals):
    start = f"import os, signal, sys, time\nfrom postil.training.signals import stopping_gracefully\n{code}"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as child:
        for number in signals:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(number)
        return child.wait(timeout=30)


@BOTH
def test_the_second_signal_ends_the_process_wherever_it_is(number, code):
    loop = (
        "with stopping_gracefully() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop: time.sleep(0.01)\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    assert run(loop, signal.SIGTERM, number) == code


def test_switched_off_the_signal_kills():
    code = "print('ready', flush=True); time.sleep(60)"
    assert run(code, signal.SIGTERM) == -signal.SIGTERM
    after = f"with stopping_gracefully(): pass\n{code}"
    assert run(after, signal.SIGTERM) == -signal.SIGTERM


def test_what_was_ignored_stays_ignored():
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with stopping_gracefully() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sys.exit(7 if not stop else 1)\n"
    )
    assert run(code) == 7


def test_outside_the_main_thread_there_is_nothing_to_ask():
    seen = []

    def work():
        with stopping_gracefully() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_an_error_inside_puts_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), stopping_gracefully():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before and os.getpid() > 0
