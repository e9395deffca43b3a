"""Loading a frontend: its CPU time is read right, and a run that did not do the whole work is no figure."""

import os
import time
from collections.abc import Iterator

import pytest

from bench.load import BenchError, Load, check_outcome, cpu_seconds, parse_cpu_ticks, require_wrk

STAT = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 31 11 5 6 20 0 4 0 100 1000 10"


def test_cpu_time_is_that_of_user_and_system_whatever_the_process_is_called() -> None:
    assert parse_cpu_ticks(STAT) == 31 + 11


def test_cpu_time_of_a_process_is_in_seconds() -> None:
    used_s = time.process_time()

    # The kernel counts both in its own ticks, of 10 ms mostly.
    assert cpu_seconds(os.getpid()) == pytest.approx(used_s, abs=0.1)


def test_a_run_is_over_once_all_answers_are_there() -> None:
    def lines() -> Iterator[str]:
        yield "Running 5m test\n"
        yield "all answered\n"
        pytest.fail("it waited for more")

    check_outcome(lines())


def test_a_refused_or_cut_answer_fails_the_run_and_is_told() -> None:
    with pytest.raises(BenchError, match="failed: status 503"):
        check_outcome(["Running 5m test\n", 'failed: status 503, ends in "no workers"\n', "all answered\n"])


def test_a_client_that_ends_early_fails_the_run_with_what_it_said() -> None:
    with pytest.raises(BenchError, match="unable to connect"):
        check_outcome(["unable to connect to 127.0.0.1:1 Connection refused\n"])


def test_all_answers_are_those_of_all_streams() -> None:
    assert Load(streams=16, answers=4, tokens=200).total_answers == 64


def test_without_wrk_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(BenchError, match="apt-get install wrk"):
        require_wrk()
