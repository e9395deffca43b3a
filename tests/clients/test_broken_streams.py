"""A client does not accept a broken stream as an answer: it fails and names the rule of inference.proto that was
broken.

| workload | nemesis | checker |
| --- | --- | --- |
| the first request of each client | a server that breaks one rule of a stream | the client fails, and says which rule |
"""

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from services.stubs import inference_pb2
from tests.clients.conftest import need
from tests.clients.support.programs import running
from tests.clients.support.toolchains import CLIENTS, Client


def tokens(position: int, count: int) -> Any:
    """Return an item with `count` tokens from `position` on."""
    delta = inference_pb2.Delta(position=position, token_ids=range(count), text="a" * count)
    return inference_pb2.GenerateResponse(delta=delta)


NEITHER = inference_pb2.GenerateResponse()
LAST = inference_pb2.GenerateResponse(complete_final=True)
BOTH = inference_pb2.GenerateResponse(delta=inference_pb2.Delta(position=2), complete_final=True)
NEITHER_DELTA_NOR_MARKER = "an item must be either a delta or the final marker"
FAULTS: dict[str, tuple[Sequence[Any], str]] = {
    # The items that the server sends, and what the client must report.
    "cut-off": ([tokens(0, 2)], "was cut off"),
    "gap": ([tokens(0, 2), tokens(3, 1), LAST], "position 3 follows 2"),
    "repeat": ([tokens(0, 2), tokens(1, 1), LAST], "position 1 follows 2"),
    "neither": ([tokens(0, 2), NEITHER, LAST], NEITHER_DELTA_NOR_MARKER),
    "both": ([tokens(0, 2), BOTH], NEITHER_DELTA_NOR_MARKER),
    "more": ([tokens(0, 2), LAST, tokens(2, 1)], NEITHER_DELTA_NOR_MARKER),
}


def fixed_answer_handler(items: Sequence[Any]) -> grpc.GenericRpcHandler:
    """Return a handler that answers every request with these items and then OK."""

    async def generate(_: Any, context: Any) -> None:
        for item in items:
            await context.write(item)

    handler = grpc.unary_stream_rpc_method_handler(
        generate,
        request_deserializer=inference_pb2.GenerateRequest.FromString,
        response_serializer=inference_pb2.GenerateResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("unbroken.v1.Inference", {"Generate": handler})


async def failure_message(command: list[str], items: Sequence[Any]) -> str:
    """Return what the client prints when it fails."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])  # Or two of them may be given one port.
    server.add_generic_rpc_handlers((fixed_answer_handler(items),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with running([*command, f"127.0.0.1:{port}"], stderr=PIPE) as process:
            printed, said = await process.communicate()
    finally:
        await server.stop(None)
    assert process.returncode != 0
    assert printed == b""
    return said.decode()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_fails_on_a_stream_that_breaks_a_rule(client: Client) -> None:
    need(client.missing)
    command = client.command()

    async def scenario() -> dict[str, str]:
        async with asyncio.TaskGroup() as group:
            tasks = {fault: group.create_task(failure_message(command, items)) for fault, (items, _) in FAULTS.items()}
        return {fault: task.result() for fault, task in tasks.items()}

    said = asyncio.run(scenario())

    assert {fault: words for fault, (_, words) in FAULTS.items() if words not in said[fault]} == {}, said
