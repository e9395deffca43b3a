"""A client that does not read one of its streams loses that stream alone, by the bounds of HTTP/1.1."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.errors import Reason
from services.core.flow.client_flow import LOOKS, ClientBounds, StallWatch
from services.http.h2.wire.frames import ErrorCode, window_update
from services.http.server.config import HttpConfig
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED, Client, connected, connection_of
from tests.http.support import HANG, Flood, Script, events, run, serving


def config(**bounds: Any) -> HttpConfig:
    return HttpConfig(client=ClientBounds(**bounds))


async def reset_of(client: Client, stream_id: int) -> ErrorCode | None:
    return (await client.answer(stream_id)).reset


def test_stream_that_is_not_read_is_reset_and_others_go_on() -> None:
    async def test() -> None:
        more = asyncio.Event()
        scripts = [Script("word " * 100_000, HANG), Script("a", more, "b")]

        async def pipeline(request: Any, call: Any, sink: Any) -> Any:
            return await scripts.pop(0)(request, call, sink)

        async with (
            serving(pipeline, config=config(stall_s_max=0.2)) as server,
            connected(server, window=0) as client,
        ):
            blocked = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[blocked].headers)
            read = client.post(COMPLETIONS, STREAMED)
            client.send(window_update(read, 1 << 20))

            assert await reset_of(client, blocked) is ErrorCode.CANCEL

            assert server.outcomes.seen == [Reason.SLOW_CLIENT]
            more.set()
            assert b'"text":"b"' in (await client.answer(read)).body

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs if entry["event"] == "client cut"] == ["SLOW_CLIENT"]


def test_stream_with_more_unread_than_its_bound_is_reset_at_once() -> None:
    async def test() -> None:
        flood = Flood("word " * 1000)
        async with (
            serving(flood, config=config(buffer_bytes_max=300_000)) as server,
            connected(server, window=0) as client,
        ):
            assert await reset_of(client, client.post(COMPLETIONS, STREAMED)) is ErrorCode.CANCEL
            assert server.outcomes.seen == [Reason.SLOW_CLIENT]

    run(test)


def test_slow_client_that_catches_up_has_everything() -> None:
    async def test() -> None:
        parts = ["word " * 4000] * 20
        go = asyncio.Event()
        script = Script(*[step for part in parts for step in (part, 1)], go, "end")
        async with serving(script) as server, connected(server, window=0) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[stream_id].headers)
            stream = connection_of(server)._frames.streams.get(stream_id)
            assert stream is not None
            while stream.has_room:
                await asyncio.sleep(0.001)

            go.set()
            client.send(window_update(stream_id, 1 << 30))
            answer = await client.answer(stream_id)

        texts = [event["choices"][0]["text"] for event in events(answer.body)[:-1]]
        assert "".join(texts) == "".join(parts) + "end"

    run(test)


@pytest.mark.parametrize("bounds", [{"drain_s_max": 0.1}, {"stall_s_max": 0.1}], ids=["in time", "at all"])
def test_end_that_is_not_read_resets_the_stream(bounds: dict[str, float]) -> None:
    async def test() -> None:
        async with (
            serving(Script("word " * 1000), config=config(**bounds)) as server,
            connected(server, window=100) as client,
        ):
            assert await reset_of(client, client.post(COMPLETIONS, COMPLETION)) is ErrorCode.CANCEL
            assert (await client.answer(client.get("/live"))).status == 200
            assert not connection_of(server).tasks

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


class Looks:
    """Looks at clients when the test says so: time does not pass by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._watches: list[StallWatch] = []
        start = StallWatch.start

        def note(watch: StallWatch) -> None:
            self._watches.append(watch)
            start(watch)

        monkeypatch.setattr(StallWatch, "start", note)

    def look(self) -> None:
        assert self._watches, "nobody is watched"
        for watch in self._watches:
            if watch._timer is not None:
                watch._timer.cancel()
                watch._look()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def test_client_that_takes_a_little_all_the_time_is_not_reset(looks: Looks) -> None:
    async def test() -> None:
        script = Script("word " * 10_000)
        async with (
            serving(script, config=config(stall_s_max=1e6, drain_s_max=1e6)) as server,
            connected(server, window=0) as client,
        ):
            stream_id = client.post(COMPLETIONS, COMPLETION)
            taken = client.answers[stream_id]
            await client.until(lambda: taken.headers)
            for size in range(1, 5 * LOOKS):
                client.send(window_update(stream_id, 1))
                await client.until(lambda size=size: len(taken.body) == size)  # type: ignore[misc]
                looks.look()
            client.send(window_update(stream_id, 1 << 20))
            answer = await client.answer(stream_id)

        assert answer.json["choices"][0]["text"] == "word " * 10_000

    run(test)


def test_client_that_takes_nothing_is_reset_after_some_looks(looks: Looks) -> None:
    async def test() -> None:
        async with (
            serving(Script("word " * 10_000), config=config(stall_s_max=1e6, drain_s_max=1e6)) as server,
            connected(server, window=0) as client,
        ):
            stream_id = client.post(COMPLETIONS, COMPLETION)
            await client.until(lambda: client.answers[stream_id].headers)
            for _ in range(LOOKS - 1):
                looks.look()
            assert connection_of(server).tasks

            looks.look()

            assert await reset_of(client, stream_id) is ErrorCode.CANCEL

    run(test)


def test_connection_that_is_not_read_keeps_content_within_bounds() -> None:
    """The windows are open, and the client's kernel takes no more: the content waits in its streams."""

    async def test() -> None:
        async def flood(request: Any, call: Any, sink: Any) -> Any:
            return await Flood("word " * 2000)(request, call, sink)

        bounds = config(buffer_bytes_max=400_000, stall_s_max=0.2)
        async with serving(flood, config=bounds) as server, connected(server) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            streams = 4
            for _ in range(streams):
                client.post(COMPLETIONS, STREAMED)
            while len(server.outcomes.seen) < streams:
                await asyncio.sleep(0.001)

            assert set(server.outcomes.seen) == {Reason.SLOW_CLIENT}
            assert not connection_of(server)._writer.ready

    run(test)


def test_waiting_for_a_token_is_no_stall(looks: Looks) -> None:
    """The client was slow, has caught up, and has nothing to take now."""

    async def test() -> None:
        more = asyncio.Event()
        script = Script("word " * 20_000, more, "end")
        async with (
            serving(script, config=config(stall_s_max=1e6)) as server,
            connected(server, window=0) as client,
        ):
            stream_id = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[stream_id].headers)
            client.send(window_update(stream_id, 1 << 20))
            stream = connection_of(server)._frames.streams.get(stream_id)
            assert stream is not None
            await client.until(lambda: len(client.answers[stream_id].body) > 100_000 and not stream.unsent_size)

            for _ in range(3 * LOOKS):
                looks.look()

            assert server.outcomes.seen == []
            more.set()
            assert b'"text":"end"' in (await client.answer(stream_id)).body

    run(test)
