"""HelperPool: a job that crashes, runs or allocates without end costs itself only; the next one is done at once."""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import Failure, Reason, RefusedFor, refused_for
from services.isolation.bounds import Bounds
from services.isolation.helper_process import HelperBug
from services.isolation.losses import HelperLost, Loss
from services.isolation.pool import HelperPool
from services.runtime.backoff import Backoff
from tests.isolation.works import LOADER
from tests.runtime.supervision.support import is_alive, until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

QUICK = Backoff(base_s=0.001, cap_s=0.001)


class NotedPool(HelperPool):
    """A pool whose losses are noted."""

    def __init__(self, content: bytes = b"", **bounds: Any) -> None:
        self.losses: list[Loss] = []
        limits = Bounds(**{"backoff": QUICK} | bounds)
        super().__init__("test", LOADER, content, bounds=limits, on_lost=self.losses.append)

    async def text(self, job: str) -> str:
        return (await self.run(job.encode())).decode()

    async def pids(self) -> tuple[int, int]:
        """The pids of a helper and of the fork server."""
        helper, server = json.loads(await self.text("pid"))
        return helper, server


@asynccontextmanager
async def pool_with(content: bytes = b"", **bounds: Any) -> AsyncIterator[NotedPool]:
    pool = NotedPool(content, **bounds)
    try:
        yield pool
    finally:
        await pool.close()


def with_pool(scenario: Callable[[NotedPool], Awaitable[None]], content: bytes = b"", **bounds: Any) -> None:
    """Run a scenario, and check that it leaves no process and no open file behind."""

    async def run() -> None:
        # The loop opens files of its own with the first process.
        await (await asyncio.create_subprocess_exec("/bin/true")).wait()
        files, children = open_files(), children_of(os.getpid())
        async with pool_with(content, **bounds) as pool:
            await scenario(pool)
        await until(lambda: open_files() <= files and children_of(os.getpid()) <= children)

    run_async(run())


def open_files() -> set[str]:
    """The pipes and sockets of this process."""
    links = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The listing's own file.
            links.add(os.readlink(path))
    return {link for link in links if link.startswith(("pipe:", "socket:"))}


def children_of(pid: int) -> set[str]:
    """The pids of a process's children. Other tests in the same process may have left some, which do not count."""
    return {child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}


async def failure_of(job: Awaitable[object]) -> Failure:
    with pytest.raises(Failure) as caught:
        await job
    return caught.value


def test_helper_answers_with_what_was_loaded() -> None:
    async def scenario(pool: NotedPool) -> None:
        assert await pool.run(b"content") == bytes(range(256))
        assert await pool.text("echo é") == "é"

    with_pool(scenario, bytes(range(256)))


def test_one_helper_does_one_job_after_the_other() -> None:
    async def scenario(pool: NotedPool) -> None:
        assert await pool.pids() == await pool.pids()

    with_pool(scenario)


def test_refusal_keeps_every_field_and_the_helper() -> None:
    async def scenario(pool: NotedPool) -> None:
        before = await pool.pids()
        failure = await failure_of(pool.run(b"refuse"))
        assert (failure.reason, failure.detail, failure.param) == (Reason.PROMPT_TOO_LONG, "no", "prompt")
        assert failure.metadata == {"a": "b"}
        assert await pool.pids() == before

    with_pool(scenario)


def test_bug_in_the_work_comes_with_its_traceback() -> None:
    async def scenario(pool: NotedPool) -> None:
        with pytest.raises(HelperBug, match="LookupError: a bug"):
            await pool.run(b"raise")

    with_pool(scenario)


@pytest.mark.parametrize(
    ("job", "loss", "how"),
    [
        ("crash", Loss.CRASH, "SIGSEGV"),
        ("signal SIGABRT", Loss.CRASH, "SIGABRT"),
        ("signal SIGBUS", Loss.CRASH, "SIGBUS"),
        ("signal SIGILL", Loss.CRASH, "SIGILL"),
        ("signal SIGFPE", Loss.CRASH, "SIGFPE"),
        ("exit 3", Loss.CRASH, "exited with status 3"),
        ("exit 0", Loss.CRASH, "exited with status 0"),
        ("spin", Loss.CPU, "SIGPROF"),
        ("eat 1000000000", Loss.MEMORY, "64 MiB"),
        ("give 2097153", Loss.MEMORY, "more than 2 MiB"),
        ("nonsense", Loss.CRASH, "nonsense"),
    ],
)
def test_job_that_costs_its_helper_is_refused_alone(job: str, loss: Loss, how: str) -> None:
    async def scenario(pool: NotedPool) -> None:
        _, server = await pool.pids()
        with pytest.raises(HelperLost) as caught:
            await pool.text(job)
        assert caught.value.loss == loss
        assert how in caught.value.how
        assert pool.losses == [loss]
        assert (await pool.pids())[1] == server, "the fork server is still the same"

    with_pool(scenario, job_cpu_s_max=0.1, job_bytes_max=64 << 20, answer_bytes_max=2 << 20)


def test_crash_does_not_disturb_the_other_jobs() -> None:
    async def scenario(pool: NotedPool) -> None:
        jobs = ["sleep 0.2", "crash", "echo a", "crash", "sleep 0.2", "spin"]
        results = await asyncio.gather(*(pool.text(job) for job in jobs), return_exceptions=True)
        assert [result for result in results if isinstance(result, str)] == ["slept", "a", "slept"]
        assert sorted(pool.losses) == [Loss.CPU, Loss.CRASH, Loss.CRASH]

    with_pool(scenario, job_cpu_s_max=0.1)


def test_waiting_does_not_count_as_processor_time() -> None:
    async def scenario(pool: NotedPool) -> None:
        assert await pool.text("sleep 0.3") == "slept"

    with_pool(scenario, job_cpu_s_max=0.1)


def test_processor_time_of_earlier_jobs_does_not_count() -> None:
    async def scenario(pool: NotedPool) -> None:
        for _ in range(20):
            await pool.text("eat 30000000")

    with_pool(scenario, job_cpu_s_max=0.1)


def test_frozen_helper_is_replaced_and_its_job_may_come_again() -> None:
    async def scenario(pool: NotedPool) -> None:
        failure = await failure_of(pool.text("freeze"))
        assert (failure.reason, refused_for(failure)) == (Reason.OVERLOADED, RefusedFor.PREPARATION)
        assert pool.losses == [Loss.FROZEN]
        assert await pool.text("echo a") == "a"

    with_pool(scenario, job_s_max=2.0)  # The other job also has to be done in this time.


def test_job_of_a_helper_that_was_killed_from_outside_is_done_by_another(tmp_path: Path) -> None:
    async def scenario(pool: NotedPool) -> None:
        assert await pool.text(f"die_once {tmp_path / 'died'}") == "alive"
        assert pool.losses == [Loss.KILLED]

    with_pool(scenario)


def test_job_whose_helpers_are_killed_twice_may_come_again() -> None:
    async def scenario(pool: NotedPool) -> None:
        assert (await failure_of(pool.text("signal SIGKILL"))).reason == Reason.OVERLOADED
        assert pool.losses == [Loss.KILLED, Loss.KILLED]

    with_pool(scenario)


def test_signals_that_are_meant_for_the_parent_end_nothing() -> None:
    async def scenario(pool: NotedPool) -> None:
        before = helper, server = await pool.pids()
        for pid in (helper, server):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        assert await pool.pids() == before

    with_pool(scenario)


def test_idle_helper_that_was_killed_costs_no_job() -> None:
    async def scenario(pool: NotedPool) -> None:
        helper, _ = await pool.pids()
        os.kill(helper, signal.SIGKILL)
        await until(lambda: not is_alive(helper))
        assert await pool.text("echo a") == "a"

    with_pool(scenario)


def test_fork_server_that_was_killed_is_started_again() -> None:
    async def scenario(pool: NotedPool) -> None:
        helper, server = await pool.pids()
        os.kill(server, signal.SIGKILL)
        await until(lambda: not is_alive(helper))
        assert await pool.text("echo a") == "a"

    with_pool(scenario)


def test_job_under_way_outlives_its_fork_server(tmp_path: Path) -> None:
    async def scenario(pool: NotedPool) -> None:
        _, server = await pool.pids()
        async with asyncio.TaskGroup() as group:
            job = group.create_task(pool.text("sleep 0.5"))
            await asyncio.sleep(0.1)
            os.kill(server, signal.SIGKILL)
        assert job.result() == "slept"
        assert pool.losses == [Loss.KILLED]

    with_pool(scenario)


def test_frozen_fork_server_is_replaced() -> None:
    async def scenario(pool: NotedPool) -> None:
        _, server = await pool.pids()
        os.kill(server, signal.SIGSTOP)
        async with asyncio.TaskGroup() as group:  # The second needs another helper.
            jobs = [group.create_task(pool.text("sleep 0.1")) for _ in range(2)]
        assert [job.result() for job in jobs] == ["slept", "slept"]
        assert not is_alive(server)

    with_pool(scenario, fork_s_max=0.3)


def test_requests_that_do_not_fit_wait_until_the_fork_server_reads_again() -> None:
    """Bug: it counted as lost, and with it all helpers, when it had some hundred requests to read."""

    async def scenario(pool: NotedPool) -> None:
        await pool.load()
        server = pool._server
        assert server is not None
        first = await server.fork()
        os.kill(server.pid, signal.SIGSTOP)
        for _ in range(1000):
            server.kill(first)
        second = asyncio.create_task(server.fork())
        await asyncio.sleep(0)
        os.kill(server.pid, signal.SIGCONT)
        assert await server.wait_exit(first) == -signal.SIGKILL
        for forked in (first, await second):
            forked.sock.close()
        assert not server.is_lost

    with_pool(scenario, fork_s_max=WAIT_S)


def test_job_is_refused_when_no_fork_server_starts_in_time() -> None:
    async def scenario(pool: NotedPool) -> None:
        failure = await failure_of(pool.text("echo a"))
        assert (failure.reason, refused_for(failure)) == (Reason.OVERLOADED, RefusedFor.PREPARATION)

    with_pool(scenario, content=b"crash", start_wait_s_max=0.5)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave that many descriptors for this process to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in range(soft) if not Path(f"/proc/self/fd/{number}").exists())
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, count, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_fork_server_that_cannot_start_for_want_of_descriptors_is_reported_and_leaves_none_open(count: int) -> None:
    async def scenario(pool: NotedPool) -> None:
        with free_descriptors(count):
            failure = await failure_of(pool.load())
        assert failure.reason is Reason.OVERLOADED
        assert "Too many open files" in failure.detail
        assert await pool.text("echo a") == "a"

    with_pool(scenario)


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"crash", "was killed by SIGSEGV"),
        (b"spin", "was killed by SIGPROF"),
        (b"raise", "LookupError: a bug"),
        (b"freeze", "takes more than 3 s"),
        (b"refuse", "no"),
    ],
)
def test_content_that_cannot_be_loaded_is_reported(content: bytes, detail: str) -> None:
    async def scenario(pool: NotedPool) -> None:
        assert detail in (await failure_of(pool.load())).detail

    with_pool(scenario, content, load_cpu_s_max=0.5, load_s_max=3.0 if content == b"freeze" else WAIT_S)


def test_more_jobs_than_the_limit_are_refused_at_once() -> None:
    async def scenario(pool: NotedPool) -> None:
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(pool.text("sleep 0.1")) for _ in range(3)]
            await asyncio.sleep(0)
            failure = await failure_of(pool.text("echo a"))
        assert (failure.reason, refused_for(failure)) == (Reason.OVERLOADED, RefusedFor.PREPARATION)
        assert [job.result() for job in jobs] == ["slept"] * 3
        assert await pool.text("echo a") == "a"

    with_pool(scenario, jobs_max=3, helpers_max=1)


def test_job_that_finds_no_free_helper_in_time_is_refused() -> None:
    async def scenario(pool: NotedPool) -> None:
        await pool.load()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(pool.text("sleep 0.5"))
            await asyncio.sleep(0)
            failure = await failure_of(pool.text("echo a"))
            assert not running.done()
        assert (failure.reason, refused_for(failure)) == (Reason.OVERLOADED, RefusedFor.PREPARATION)
        assert "no process was free within 0.05 s" in failure.detail
        assert failure.retry_after_s is not None
        assert await pool.text("echo a") == "a"

    with_pool(scenario, helpers_max=1, wait_s_max=0.05)


def test_no_more_helpers_than_the_limit_run() -> None:
    async def scenario(pool: NotedPool) -> None:
        _, server = await pool.pids()
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(pool.text("sleep 0.2")) for _ in range(6)]
            counts = []
            while not all(job.done() for job in jobs):
                await asyncio.sleep(0.01)
                counts.append(len(children_of(server)))
        assert max(counts) == 2

    with_pool(scenario, helpers_max=2)


def test_helper_ends_after_its_last_job_and_after_idle_time() -> None:
    async def scenario(pool: NotedPool) -> None:
        first, second, third = [(await pool.pids())[0] for _ in range(3)]
        assert first == second != third
        await until(lambda: not is_alive(first) and not is_alive(third))

    with_pool(scenario, helper_jobs_max=2, idle_s_max=0.1)


def test_cancelled_caller_ends_its_helper_and_nothing_else() -> None:
    async def scenario(pool: NotedPool) -> None:
        for job in ("spin", "sleep 60", "freeze"):
            helper, server = await pool.pids()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await pool.text(job)
            await until(lambda pid=helper: not is_alive(pid))  # type: ignore[misc]
            assert (await pool.pids())[1] == server
        assert pool.losses == []

    with_pool(scenario)


@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.01, 0.05, 0.2, 0.4])
def test_caller_may_be_cancelled_at_any_time(wait_s: float) -> None:
    """While the fork server starts, while a helper is forked, while it works, while another job has the only helper."""

    async def scenario(pool: NotedPool) -> None:
        tasks = [asyncio.ensure_future(pool.text("sleep 0.1")) for _ in range(3)]
        await asyncio.sleep(wait_s)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks)
        assert tasks[0].result() == "slept"
        assert await pool.text("echo a") == "a"

    with_pool(scenario, helpers_max=1)


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.3, 1.0])
def test_close_may_come_at_any_time(wait_s: float) -> None:
    async def scenario(pool: NotedPool) -> None:
        task = asyncio.ensure_future(pool.text("sleep 5"))
        await asyncio.sleep(wait_s)
        await pool.close()
        assert (await failure_of(task)).reason == Reason.OVERLOADED

    with_pool(scenario)


def test_jobs_that_run_or_wait_start_nothing_once_the_pool_closes() -> None:
    async def run() -> None:
        children = children_of(os.getpid())
        pool = NotedPool(helpers_max=1)
        await pool.pids()
        jobs = [asyncio.ensure_future(pool.text("sleep 5")) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        assert [(await failure_of(job)).reason for job in jobs] == [Reason.OVERLOADED] * 3
        assert children_of(os.getpid()) <= children

    run_async(run())


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        pids = tmp_path / "pids"
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.isolation.parent", str(pids)), cwd=Path(__file__).parents[2]
        )
        await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        helper, server = json.loads(pids.read_text())
        parent.kill()
        await parent.wait()
        await until(lambda: not is_alive(helper) and not is_alive(server))

    run_async(scenario())


def test_helper_may_write_much_to_standard_error() -> None:
    async def scenario(pool: NotedPool) -> None:
        for _ in range(3):
            assert await pool.text("write 200000") == "written"

    with_pool(scenario, job_s_max=5.0)


def test_loss_does_not_quote_what_the_job_of_another_client_made_its_helper_write() -> None:
    async def scenario(pool: NotedPool) -> None:
        await pool.text("write 100")
        with pytest.raises(HelperLost) as caught:
            await pool.text("crash")
        assert caught.value.how == "was killed by SIGSEGV"
        assert "xxx" in caught.value.report, "the log may have it"

    with_pool(scenario)


def test_large_jobs_and_answers_pass() -> None:
    async def scenario(pool: NotedPool) -> None:
        text = "x" * 16_000_000
        assert await pool.text(f"echo {text}") == text

    with_pool(scenario)


# Conversations


def test_jobs_of_a_conversation_go_to_one_helper_of_its_own_which_ends_with_it() -> None:
    async def scenario(pool: NotedPool) -> None:
        shared, _ = await pool.pids()
        async with pool.conversation() as helper:
            first, again = [json.loads(await helper.do(b"pid"))[0] for _ in range(2)]
            assert first == again != shared
            assert (await pool.pids())[0] == shared
        await until(lambda: not is_alive(first))

    with_pool(scenario)


def test_conversation_that_costs_its_helper_ends_with_the_loss_and_the_next_one_works() -> None:
    async def scenario(pool: NotedPool) -> None:
        async def crash() -> None:
            async with pool.conversation() as helper:
                await helper.do(b"echo fine")
                await helper.do(b"crash")

        with pytest.raises(HelperLost):
            await crash()
        assert pool.losses == [Loss.CRASH]
        async with pool.conversation() as helper:
            assert await helper.do(b"echo again") == b"again"

    with_pool(scenario)


def test_conversation_counts_as_one_job() -> None:
    async def scenario(pool: NotedPool) -> None:
        async with pool.conversation() as helper:
            await helper.do(b"echo one")
            await helper.do(b"echo two")
            assert (await failure_of(pool.run(b"echo three"))).reason is Reason.OVERLOADED
        assert await pool.text("echo four") == "four"

    with_pool(scenario, jobs_max=1)


def test_cancelled_conversation_ends_its_helper() -> None:
    async def scenario(pool: NotedPool) -> None:
        pids: list[int] = []

        async def converse() -> None:
            async with pool.conversation() as helper:
                pids.append(json.loads(await helper.do(b"pid"))[0])
                await helper.do(b"spin")

        talk = asyncio.create_task(converse())
        await until(lambda: bool(pids))
        talk.cancel()
        await asyncio.wait([talk])
        assert talk.cancelled()
        await until(lambda: not is_alive(pids[0]))

    with_pool(scenario)
