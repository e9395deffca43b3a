"""A load run counts only if every answer is complete."""

from collections.abc import Iterator

import pytest

from bench.clients.wrk import Load, check_outcome, post, require_wrk
from bench.measure.errors import BenchError


def test_run_ends_once_all_answers_have_arrived() -> None:
    def lines() -> Iterator[str]:
        yield "Running 5m test\n"
        yield "all answered\n"
        pytest.fail("it read on after the last answer")

    check_outcome(lines())


def test_refused_or_cut_answer_fails_the_run_with_its_reason() -> None:
    with pytest.raises(BenchError, match="failed: status 503"):
        check_outcome(["Running 5m test\n", 'failed: status 503, ends in "no workers"\n', "all answered\n"])


def test_client_that_exits_early_fails_the_run_with_its_output() -> None:
    with pytest.raises(BenchError, match="unable to connect"):
        check_outcome(["unable to connect to 127.0.0.1:1 Connection refused\n"])


def test_totals_count_the_answers_and_tokens_of_all_streams() -> None:
    load = Load(streams=16, answers=4, tokens=200)

    assert (load.total_answers, load.total_tokens) == (64, 12_800)


def test_request_states_its_content_length() -> None:
    assert post("host:1", b"body!").endswith(b"\r\nContent-Length: 5\r\n\r\nbody!")


def test_missing_wrk_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(BenchError, match="apt-get install wrk"):
        require_wrk()
