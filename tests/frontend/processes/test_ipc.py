"""RemoteControl returns the other process's answer, and distinguishes an exit, a stall and a failure."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from services.core.call import Call
from services.core.errors import Failure, Reason, invalid
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.control import Changes
from services.frontend.processes import ipc
from services.frontend.processes.ipc import (
    SUPERVISOR_SOCKET,
    JoinResponse,
    ProcessGone,
    RemoteControl,
    control_app,
    serve_control,
)
from services.frontend.routing.thresholds import Thresholds
from services.http.server.config import HttpConfig
from tests.frontend.processes.support import PausableControl, Process, short_folder, supervised
from tests.support.doubles import run_async

PREFILL = "active_prefill_tokens_threshold"


@contextmanager
def no_more_files() -> Iterator[None]:
    """Within the block this process can open no further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = os.open(os.devnull, os.O_RDONLY)
    os.close(least)  # The lowest free descriptor: the limit forbids it and all higher ones.
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Refusing(PausableControl):
    """Refuses every change of thresholds."""

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        raise invalid("model", f"{model} is as it should be")


def test_remote_control_calls_are_answered_by_the_other_process(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        process = Process()
        process.requests.inc(3)
        with short_folder() as folder:
            path = folder / "one.sock"
            async with process.serving(path):
                remote = RemoteControl(path, answer_s_max=10)
                await remote.set_thresholds("org/a model", {PREFILL: 2**64 - 1})

                assert b"p_requests_total 3.0" in await remote.exposition()
                assert await remote.cancel("..", EVERYBODY) == 0
                assert process.thresholds.of("org/a model") == Thresholds(active_prefill_tokens=2**64 - 1)

    run_async(scenario())
    assert not caplog.records


@pytest.mark.parametrize("was_there", [True, False])
def test_process_is_gone_if_nothing_listens_on_its_socket(was_there: bool) -> None:
    async def scenario() -> None:
        with short_folder() as folder:
            path = folder / "one.sock"
            if was_there:
                async with Process().serving(path):
                    pass
            with pytest.raises(ProcessGone):
                await RemoteControl(path, answer_s_max=10).exposition()

    run_async(scenario())


def test_process_that_exits_before_its_answer_is_gone() -> None:
    async def scenario() -> None:
        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        with short_folder() as folder:
            path = folder / "one.sock"
            async with await asyncio.start_unix_server(hang_up, path):
                with pytest.raises(ProcessGone):
                    await RemoteControl(path, answer_s_max=10).cancel("r", EVERYBODY)

    run_async(scenario())


def test_process_that_exits_during_its_answer_is_gone() -> None:
    async def scenario() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf of it")
            writer.close()

        with short_folder() as folder:
            path = folder / "one.sock"
            async with await asyncio.start_unix_server(hang_up, path):
                with pytest.raises(ProcessGone):
                    await RemoteControl(path, answer_s_max=10).exposition()

    run_async(scenario())


def test_process_that_does_not_answer_in_time_is_stalled() -> None:
    async def scenario() -> None:
        process = Process()
        process.control.may_answer.clear()
        with short_folder() as folder:
            path = folder / "one.sock"
            async with process.serving(path):
                with pytest.raises(Failure) as caught:
                    await RemoteControl(path, answer_s_max=0.05).exposition()
                process.control.may_answer.set()

        assert caught.value.reason is Reason.STALLED

    run_async(scenario())


def test_process_that_accepts_no_connection_is_stalled() -> None:
    """It may only be paused."""

    async def scenario() -> None:
        with short_folder() as folder, socket.socket(socket.AF_UNIX) as full:
            full.bind(str(folder / "one.sock"))
            full.listen(0)
            with socket.socket(socket.AF_UNIX) as waiting:
                waiting.connect(str(folder / "one.sock"))
                with pytest.raises(Failure, match="cannot connect to a process") as caught:
                    await RemoteControl(folder / "one.sock", answer_s_max=10).exposition()

        assert caught.value.reason is Reason.STALLED

    run_async(scenario())


def test_process_is_not_dropped_if_no_socket_can_be_opened() -> None:
    async def scenario() -> None:
        process = Process()
        async with supervised(answer_s_max=10) as (group, folder), process.serving(folder / "one.1.sock"):
            group.join("one", folder / "one.1.sock", pid=1)
            with no_more_files(), pytest.raises(Failure, match="1 of 1 processes"):
                await group.cancel("r", EVERYBODY)
            process.gate.enter(Call(request_id="r"))

            assert await group.cancel("r", EVERYBODY) == 1

    run_async(scenario())


def test_cancelled_call_does_not_delay_other_calls() -> None:
    async def scenario() -> None:
        process = Process()
        process.control.may_answer.clear()
        async with supervised(answer_s_max=10) as (group, folder), process.serving(folder / "one.1.sock"):
            group.join("one", folder / "one.1.sock", pid=1)
            supervisor = RemoteControl(folder / SUPERVISOR_SOCKET, answer_s_max=10)
            async with asyncio.TaskGroup() as tasks:
                for count in (1, 2):
                    asking = tasks.create_task(supervisor.exposition())
                    while process.control.call_count < count:  # The second does not queue behind the first.
                        await asyncio.sleep(0)
                    asking.cancel()
            process.control.may_answer.set()

    run_async(scenario())


def test_tenant_cancels_none_but_its_own_requests_in_the_other_process() -> None:
    acme, other = Tenant(name="acme"), Tenant(name="other")

    async def scenario() -> list[int]:
        process = Process()
        process.gate.enter(Call(request_id="r", tenant=acme))
        with short_folder() as folder:
            path = folder / "one.sock"
            async with process.serving(path):
                remote = RemoteControl(path, answer_s_max=10)
                return [await remote.cancel("r", tenant) for tenant in (other, EVERYBODY, acme)]

    assert run_async(scenario()) == [0, 0, 1]


def test_failure_of_the_other_process_is_raised_unchanged() -> None:
    async def scenario() -> None:
        process = Process()
        control = Refusing(process.registry, process.gate, process.thresholds)
        with short_folder() as folder:
            path = folder / "one.sock"
            async with serve_control(control_app(control), path):
                with pytest.raises(Failure) as caught:
                    await RemoteControl(path, answer_s_max=10).set_thresholds("m", {})

        assert (caught.value.reason, caught.value.detail) == (Reason.INVALID_ARGUMENT, "m is as it should be")

    run_async(scenario())


def test_bug_in_the_other_process_is_internal_and_logged_there() -> None:
    async def scenario() -> None:
        async def break_down() -> bytes:
            raise ZeroDivisionError

        process = Process()
        process.control.exposition = break_down  # type: ignore[method-assign]
        with short_folder() as folder, capture_logs() as logs:
            path = folder / "one.sock"
            async with process.serving(path):
                with pytest.raises(Failure) as caught:
                    await RemoteControl(path, answer_s_max=10).exposition()

        assert caught.value.reason is Reason.INTERNAL
        assert [line["event"] for line in logs] == ["bug"]

    run_async(scenario())


def test_body_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "BODY_BYTES_MAX", 100)

    async def scenario() -> None:
        with short_folder() as folder:
            path = folder / "one.sock"
            async with Process().serving(path):
                with pytest.raises(Failure) as caught:
                    await RemoteControl(path, answer_s_max=10).cancel("r" * 100, EVERYBODY)

        assert caught.value.reason is Reason.BODY_TOO_LARGE

    run_async(scenario())


def test_answer_that_runs_when_the_process_exits_is_cancelled_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the caller would wait for `answer_s_max`, and report that the process has stalled."""
    monkeypatch.setattr(ipc, "_CONFIG", HttpConfig(shutdown_s_max=0.05))

    async def scenario() -> None:
        process = Process()
        process.control.may_answer.clear()
        with short_folder() as folder:
            path = folder / "one.sock"
            async with asyncio.TaskGroup() as tasks:
                async with process.serving(path):
                    asking = tasks.create_task(outcome(RemoteControl(path, answer_s_max=10)))
                    while not process.control.call_count:
                        await asyncio.sleep(0)
                assert isinstance(await asking, ProcessGone)

    run_async(scenario())


async def outcome(remote: RemoteControl) -> bytes | Failure:
    try:
        return await remote.exposition()
    except Failure as failure:
        return failure


def test_process_is_asked_after_it_has_joined() -> None:
    async def scenario() -> None:
        process = Process()
        process.requests.inc(3)
        async with supervised(answer_s_max=10) as (group, folder), process.serving(folder / "one.1.sock"):
            await group.set_thresholds("m", {PREFILL: 7})
            supervisor = RemoteControl(folder / SUPERVISOR_SOCKET, answer_s_max=10)
            joined = await supervisor.join("one", folder / "one.1.sock")

            assert joined == JoinResponse({"m": {PREFILL: 7}}, is_successor=False)
            assert b"p_requests_total 3.0" in await supervisor.exposition()

    run_async(scenario())
