"""A bare grpc.aio server: answers `Inference.Generate` with messages made beforehand, one for each token.

    python -m bench.floor.bare_grpc TOKENS ITL_MS

Each stream has its own timer and receives a message every ITL_MS. A late stream does not catch up.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.measure.child_process import ChildProcess, send
from services.runtime.loop import run_on_loop
from services.stubs import inference_pb2

HOST = "127.0.0.1"


@contextmanager
def serving_bare_grpc(tokens: int, itl_ms: float) -> Iterator[tuple[str, int]]:
    """Run the server while the context is open; yields its address and pid."""
    with ChildProcess("floor.bare_grpc", tokens, itl_ms) as child:
        yield f"{HOST}:{child.receive()}", child.pid


def messages(tokens: int) -> list[bytes]:
    """Return messages as a frontend sends them: one token, its text and its position each; the marker comes last."""
    deltas = (inference_pb2.Delta(position=position, token_ids=[101], text="e") for position in range(tokens))
    items = [inference_pb2.GenerateResponse(delta=delta) for delta in deltas]
    return [item.SerializeToString() for item in (*items, inference_pb2.GenerateResponse(complete_final=True))]


async def serve(answer: Sequence[bytes], itl_s: float) -> None:
    """Serve until cancelled."""
    import grpc

    async def generate(_: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for message in answer:
            due = max(due + itl_s, loop.time())
            await asyncio.sleep(due - loop.time())
            await context.write(message)

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(generate)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("unbroken.v1.Inference", {"Generate": method})]
    )
    send(server.add_insecure_port(f"{HOST}:0"))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")  # As `unbroken` sets it: see services/cli.
    run_on_loop(serve(messages(int(sys.argv[1])), float(sys.argv[2]) * 1e-3))
