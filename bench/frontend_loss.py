"""Kill a frontend under kept streams, come back to the other one, and measure what the clients notice.

    python -m bench.frontend_loss --streams 100

Two frontends, two workers. All clients stream from the first frontend with `x-on-disconnect: continue`, half of them
over SSE and half over gRPC. It is killed with SIGKILL in the middle, and the clients go on at the second one, with
their cursor and at once. Each answer is compared with that of an undisturbed run: text, finish reason, log
probabilities and usage. The workers' own counters say whether a prompt or a token was computed twice. The last line
shows the counts. The exit status is 1 if an answer was lost or wrong, or something was computed twice.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc

from bench.measure.quantiles import quantiles_ms
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.clients.send import run_together
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process

TOKENS = 200
ITL_MS = 20
KILL_AFTER = 60
"""Tokens of the slowest client at which the frontend is killed."""
TRIES_MAX = 10
WIRES = ("sse", "grpc")


@dataclass
class Answer:
    """What one client has got.

    `gap_s`: the longest time between two of its events. `has_begun_well`: it has KILL_AFTER tokens.
    """

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: Any = None
    usage: Any = None
    generation_id: str = ""
    cursor: str = ""
    resumes: int = 0
    gap_s: float = 0.0
    last_at: float | None = None
    has_begun_well: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        """An event has come."""
        now = time.monotonic()
        if self.last_at is not None:
            self.gap_s = max(self.gap_s, now - self.last_at)
        self.last_at = now
        if len(self.logprobs) >= KILL_AFTER:
            self.has_begun_well.set()

    @property
    def content(self) -> tuple[Any, ...]:
        """What must equal the undisturbed answer."""
        return self.text, self.logprobs, self.finish, self.usage


class SseClient:
    """A client of /v1/completions."""

    def __init__(self, number: int) -> None:
        self.answer = Answer()
        self._body = {
            "model": "mocker",
            "prompt": f"Prompt {number}",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def begin(self, frontend: Frontend) -> None:
        """Stream from the beginning. Returns when the connection ends."""
        body = json.dumps(self._body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-On-Disconnect: continue\r\nContent-Length: {len(body)}"
        await self._read(frontend, f"{head}\r\n\r\n".encode() + body)

    async def resume(self, frontend: Frontend) -> None:
        """Go on at the cursor."""
        cursor = f"Last-Event-ID: {self.answer.cursor}\r\n" if self.answer.cursor else ""
        path = f"/v1/streams/{self.answer.generation_id}"
        await self._read(frontend, f"GET {path} HTTP/1.1\r\nHost: x\r\n{cursor}\r\n".encode())

    @property
    def is_complete(self) -> bool:
        return self.answer.usage is not None

    async def _read(self, frontend: Frontend, request: bytes) -> None:
        host, port = frontend.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            cursor = ""
            while line := await reader.readline():
                if line.lower().startswith(b"x-unbroken-generation-id: "):
                    self.answer.generation_id = line.split()[1].decode()
                elif line.startswith(b"id: "):
                    cursor = line[4:].strip().decode()
                elif line == b"data: [DONE]\n":
                    return
                elif line.startswith(b"data: ") and line.endswith(b"\n"):
                    self._on_event(json.loads(line[6:]))
                    self.answer.cursor = cursor
        finally:
            writer.close()

    def _on_event(self, event: Any) -> None:
        if "error" in event:
            raise ConnectionError(event["error"]["message"])
        self.answer.note()
        for choice in event["choices"]:
            self.answer.text += choice["text"]
            self.answer.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.answer.finish = choice["finish_reason"] or self.answer.finish
        self.answer.usage = event["usage"] or self.answer.usage


class GrpcClient:
    """A client of Inference.Generate and Inference.Resume."""

    def __init__(self, number: int) -> None:
        self.answer = Answer()
        self._is_complete = False
        self._request = inference_pb2.GenerateRequest(
            model="mocker",
            text=f"Prompt {number}",
            logprobs=0,
            sampling=inference_pb2.Sampling(temperature=0.8, seed=number),
            stop=inference_pb2.Stop(max_tokens=TOKENS, ignore_eos=True),
        )

    async def begin(self, frontend: Frontend) -> None:
        """Stream from the beginning. Returns when the rpc ends well; raises ConnectionError otherwise."""
        async with grpc.aio.insecure_channel(frontend.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await self._read(stub.Generate(self._request, metadata=[("x-on-disconnect", "continue")]))

    async def resume(self, frontend: Frontend) -> None:
        """Go on at the cursor."""
        async with grpc.aio.insecure_channel(frontend.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            answer = self.answer
            request = inference_pb2.ResumeRequest(generation_id=answer.generation_id, cursor=answer.cursor)
            await self._read(stub.Resume(request))

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    async def _read(self, items: AsyncIterable[inference_pb2.GenerateResponse]) -> None:
        try:
            async for item in items:
                self._on_item(item)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.details()) from error

    def _on_item(self, item: inference_pb2.GenerateResponse) -> None:
        answer = self.answer
        answer.note()
        answer.generation_id = item.generation_id or answer.generation_id
        answer.cursor = item.cursor or answer.cursor
        self._is_complete = item.complete_final
        answer.text += item.delta.text
        answer.logprobs += [one.logprob for one in item.delta.logprobs]
        answer.finish = item.delta.finish_reason or answer.finish
        if item.delta.HasField("usage"):
            usage = item.delta.usage
            answer.usage = (usage.prompt_tokens, usage.completion_tokens)


Client = SseClient | GrpcClient


def clients(streams: int, wires: Sequence[str]) -> list[Client]:
    kinds: dict[str, type[Client]] = {"sse": SseClient, "grpc": GrpcClient}
    return [kinds[wire](number) for wire in wires for number in range(streams)]


async def run_client(client: Client, first: Frontend, second: Frontend) -> None:
    """Stream from the first frontend, and come back to the second one as often as the connection breaks."""
    with suppress(OSError):  # The frontend was killed.
        await client.begin(first)
    for _ in range(TRIES_MAX):
        if client.is_complete:
            return
        client.answer.resumes += 1
        await client.resume(second)


async def engine_counts(workers: Sequence[Process]) -> tuple[float, float]:
    """Prompt tokens computed and tokens drawn, by all workers."""
    names = ("unbroken_engine_prefill_tokens_total", "unbroken_engine_generated_tokens_total")
    prefill, generated = [sum([await worker.metric(name) for worker in workers]) for name in names]
    return prefill, generated


@dataclass(frozen=True)
class Loss:
    """What the clients of the frontend that was killed have noticed, and what the engines have computed twice.

    `gaps_ms`: quantiles of the longest gap of each answer. `calm_gaps_ms`: the same of the undisturbed run.
    """

    streams: int
    resumed: int
    complete: int
    equal: int
    prompt_tokens_twice: float
    tokens_twice: float
    gaps_ms: Mapping[str, float]
    calm_gaps_ms: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        return self.complete == self.equal == self.streams and not (self.prompt_tokens_twice or self.tokens_twice)

    def __str__(self) -> str:
        both = (self.gaps_ms, self.calm_gaps_ms)
        shown = [", ".join(f"{name} {gap_ms} ms" for name, gap_ms in one.items()) for one in both]
        return (
            f"streams {self.streams}, resumed {self.resumed}, complete {self.complete}, equal {self.equal}, "
            f"computed twice: {self.prompt_tokens_twice:g} prompt tokens and {self.tokens_twice:g} tokens, "
            f"longest gap of an answer {shown[0]} (undisturbed {shown[1]})"
        )


async def measure(plane: Plane, streams: int, wires: Sequence[str]) -> Loss:
    """Run the clients undisturbed, then again with the loss of their frontend."""
    first, second = plane.frontend, await asyncio.to_thread(plane.start_frontend)
    options = (f"--mocker-itl-ms={ITL_MS}", "--metrics-port=0", "--engine-request-limit=512")
    workers = await run_together(plane.worker(*options) for _ in range(2))
    undisturbed, kept = clients(streams, wires), clients(streams, wires)
    await run_together(second.logged("worker found", instance=worker.ready["instance_id"]) for worker in workers)
    await run_together(run_client(client, second, second) for client in undisturbed)
    before = await engine_counts(workers)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_client(client, first, second)) for client in kept]
        await run_together(client.answer.has_begun_well.wait() for client in kept)
        first.kill()
        await asyncio.wait(tasks)
    after = await engine_counts(workers)
    prompt_tokens_twice, tokens_twice = [late - 2 * early for late, early in zip(after, before, strict=True)]
    return Loss(
        streams=len(kept),
        resumed=sum(client.answer.resumes > 0 for client in kept),
        complete=sum(client.is_complete for client in kept),
        equal=sum(mine.answer.content == other.answer.content for mine, other in zip(kept, undisturbed, strict=True)),
        prompt_tokens_twice=prompt_tokens_twice,
        tokens_twice=tokens_twice,
        gaps_ms=quantiles_ms([client.answer.gap_s for client in kept]),
        calm_gaps_ms=quantiles_ms([client.answer.gap_s for client in undisturbed]),
    )


@click.command(help="Kill a frontend under kept streams, and measure what clients notice.")
@click.option("--streams", type=click.IntRange(1), default=100, show_default=True, help="Clients of each wire.")
@click.option("--wires", default=",".join(WIRES), show_default=True, help="What the clients speak.")
def main(streams: int, wires: str) -> None:
    with ForkServer() as fork_server, tempfile.TemporaryDirectory() as folder:
        plane = Plane(fork_server, Path(folder))
        try:
            loss = asyncio.run(measure(plane, streams, wires.split(",")))
        finally:
            plane.close()
    click.echo(str(loss))
    sys.exit(0 if loss.is_right else 1)


if __name__ == "__main__":
    main()
