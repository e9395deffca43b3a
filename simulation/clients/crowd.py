"""Requests of others: they come to a worker directly and take its slots and places for a while."""

import asyncio

from services.stubs import inference_pb2
from simulation.grpc.client_rpc import ClientRpc
from simulation.plane import worker_port
from simulation.runtime.world import World

MAX_TOKENS = 10_000


def fill(world: World, worker: str, count: int, duration_s: float) -> None:
    """Send `count` requests that last for `duration_s`, unless the worker refuses them or ends."""

    async def main() -> None:
        rpcs = [ClientRpc() for _ in range(count)]
        try:
            for number, rpc in enumerate(rpcs):
                await rpc.open("127.0.0.1", worker_port(worker))
                rpc.begin("/unbroken.v1.Inference/Generate", {})
                rpc.send(_request(number), is_last=True)
        except OSError as error:
            world.say("crowd", f"{worker} is away: {error}")
        await asyncio.sleep(duration_s)

    world.spawn(f"crowd-{len(world.processes)}", main)


def _request(number: int) -> bytes:
    request = inference_pb2.GenerateRequest(
        model="mocker",
        tokens=inference_pb2.TokenIds(ids=[97]),
        request_id=f"crowd{number}",
        stop=inference_pb2.Stop(max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    return request.SerializeToString()
