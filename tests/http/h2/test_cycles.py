"""A request over HTTP/2 leaves nothing that waits for the garbage collector, whose collections stop all streams."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.core.flow.delta_buffer import DeltaBuffer
from services.frontend.api.openai.sse.backlog import Backlog
from services.http.grpc.rpc import RpcContext
from services.http.h2.request import Request
from services.http.h2.stream import Stream
from services.http.h2.wire.frames import window_update
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from tests.http.grpc.support import HEADERS, UNARY_CALL, message, raw_client, serving_rpcs
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED, Client, connected
from tests.http.support import Flood, Script, run, serving

KINDS = (Stream, Request, RpcContext, HttpRequest, Backlog, DeltaBuffer)


def left() -> list[Any]:
    return [one for one in gc.get_objects() if isinstance(one, KINDS)]


async def without_collections(client: Client, ask: Callable[[], int], *, resets: bool = False) -> None:
    """Ask a few times, and see what is left. `resets`: the server resets the stream after its answer."""
    gc.collect()
    before = {id(one) for one in left()}  # Other tests may have left some that their event loop keeps.
    gc.disable()
    try:
        for _ in range(3):
            answer = await client.answer(ask())
            await client.until(lambda: not resets or answer.reset is not None)  # noqa: B023
        last = client.get("/unknown")
        client.send(window_update(last, 1 << 20))
        await client.answer(last)  # The tasks before have ended.
        new = [one for one in left() if id(one) not in before]
        found = [one for one in new if not (isinstance(one, HttpRequest) and one.path == "/unknown")]
        assert len([one for one in found if not isinstance(one, Stream | Request)]) == 0
        assert len(found) <= 2, "those of the last request, whose task may not have ended"
    finally:
        gc.enable()


@pytest.mark.parametrize("body", [COMPLETION, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", [("a", 1, "b"), (Reason.OVERLOADED,)], ids=["answered", "refused"])
def test_answer_leaves_no_cycle(body: dict[str, Any], steps: tuple[Any, ...]) -> None:
    async def test() -> None:
        async with serving(Script(*steps)) as server, connected(server) as client:
            await without_collections(client, lambda: client.post(COMPLETIONS, body))

    run(test)


@pytest.mark.parametrize("content", [message(b""), message(b"\xff"), b""], ids=["answered", "undecodable", "empty"])
def test_rpc_leaves_no_cycle(content: bytes) -> None:
    async def test() -> None:
        async with serving_rpcs() as server, raw_client(server) as client:
            await without_collections(client, lambda: client.post(UNARY_CALL, content, HEADERS))

    run(test)


def test_reset_leaves_no_cycle() -> None:
    """The answer, 413, is sent before the body has come, and the rest is reset."""

    async def test() -> None:
        config = HttpConfig(lingering_s_max=0)
        async with serving(Script(), config=config) as server, connected(server) as client:
            headers = {"content-length": str(1 << 40)}
            await without_collections(client, lambda: client.open(COMPLETIONS, headers, ends=False), resets=True)

    run(test)


def test_slow_client_leaves_no_cycle() -> None:
    """Bug: what waited for it was kept until the next full collection."""

    async def test() -> None:
        config = HttpConfig(client=ClientBounds(buffer_bytes_max=200_000))
        async with (
            serving(Flood("word " * 1000), config=config) as server,
            connected(server, window=0) as client,
        ):
            await without_collections(client, lambda: client.post(COMPLETIONS, STREAMED))

    run(test)
