"""A frontend's HTTP application on a real port, with a script in place of the pipeline."""

import asyncio
import fcntl
import json
import socket
import ssl
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from services.core.call import Call
from services.core.common_layers import Accept
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink, TokenLogprobs, Usage
from services.core.model_card import ModelCard, TokenizerRef
from services.core.request import FinishReason, Request
from services.core.tenant import Tenant, TenantOf
from services.frontend.api.admin.admin import Admin, AdminConfig
from services.frontend.api.build import build_admin_app, build_app
from services.frontend.resume.finder import GenerationFinder
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.http.h1.exchange import unsent_bytes
from services.http.host_rule import HostRule
from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.context import ConnectionContext, Rpcs
from services.http.server.detector import Detector
from services.http.server.listener import Listen, http_server
from services.http.server.secure import Tls
from services.models.tokenizers import Vocabulary
from services.models.tokenizers.byte_level import ByteTokenizer
from services.runtime.loop import run_on_loop
from tests.frontend.support import alone, finder_of
from tests.support.clock import WAIT_S
from tests.support.doubles import models_of

HANG = "hang"
CARD = ModelCard(model="org/tiny", engine="mocker", context_length=64, vocab_size=256, tokenizer=TokenizerRef("bytes"))

PROMPT_TOKENS = 3
PROMPT = (5, 6, 7)
"""The token ids that every prompt is said to have."""


@dataclass
class Say:
    """A delta of one choice. Each byte of `tokens` is a token, with `logprob`, and `top` as its likeliest tokens."""

    text: str = ""
    choice: int = 0
    tokens: bytes = b"\0"
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class End:
    """The last delta of one choice, with the text that was held back."""

    choice: int = 0
    reason: FinishReason = FinishReason.STOP
    text: str = ""


Step = str | Say | End | int | Reason | Failure | Exception | asyncio.Event


class Script:
    """A pipeline that plays its steps, then ends every choice that has no End.

    A text is a token; a number waits for as many iterations of the event loop; HANG waits for ever; an event is waited
    for; a reason or an exception is raised. `seed`: what the client is told.
    """

    def __init__(self, *steps: Step, seed: int | None = None) -> None:
        self.steps: Sequence[Step] = steps
        self.requests: list[Request] = []
        self.calls: list[Call] = []
        self.seed = seed
        self.running = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.requests.append(request)
        self.calls.append(call)
        call.told.seed, call.told.prompts = self.seed, [PROMPT] * max(len(request.parts), 1)
        self.running.set()
        try:
            return await self._play(_Choices(sink, request.n, PROMPT_TOKENS if call.counts_prompt else 0))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _play(self, choices: "_Choices") -> Finish:
        for step in self.steps:
            match step:
                case Reason():
                    raise Failure(step, "as scripted", retry_after_s=1.2)
                case Exception():
                    raise step
                case asyncio.Event():
                    await step.wait()
                case int():
                    for _ in range(step):
                        await asyncio.sleep(0)
                case "hang":
                    await asyncio.Event().wait()
                case str() | Say() | End():
                    choices.deliver(step)
        return choices.finish()


class _Choices:
    """Positions of each choice, an end for each, and the usage with the last one, as the pipeline makes them."""

    def __init__(self, sink: Sink, count: int, prompt_tokens: int) -> None:
        """`prompt_tokens`: what each delta has."""
        self._sink = sink
        self._prompt_tokens = prompt_tokens
        self._positions = [0] * count
        self._reasons: dict[int, FinishReason] = {}

    @property
    def _usage(self) -> Usage:
        return Usage(PROMPT_TOKENS, sum(self._positions))

    def deliver(self, step: str | Say | End) -> None:
        if isinstance(step, End):
            self._end(step)
        else:
            self._say(Say(step) if isinstance(step, str) else step)

    def _say(self, step: Say) -> None:
        position = self._positions[step.choice]
        logprobs = None if step.logprob is None else [TokenLogprobs(step.logprob, step.top)] * len(step.tokens)
        self._positions[step.choice] += len(step.tokens)
        delta = Delta(position, list(step.tokens), step.text, step.choice, logprobs)
        delta.prompt_tokens = self._prompt_tokens
        self._sink.deliver(delta)

    def _end(self, step: End) -> None:
        self._reasons[step.choice] = step.reason
        usage = self._usage if len(self._reasons) == len(self._positions) else None
        position = self._positions[step.choice]
        delta = Delta(position, (), step.text, step.choice, finish_reason=step.reason, usage=usage)
        delta.prompt_tokens = self._prompt_tokens
        self._sink.deliver(delta)

    def finish(self) -> Finish:
        for choice in range(len(self._positions)):
            if choice not in self._reasons:
                self._end(End(choice))
        return Finish(self._reasons[0], self._usage)


class Flood:
    """A pipeline that never ends and delivers `text` in every iteration of the event loop."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            while True:
                sink.deliver(Delta(position=self.position, token_ids=[self.position], text=self.text))
                self.position += 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@dataclass
class StubFrontend:
    """The state of a frontend: a stand-in for its catalog, pool and gate."""

    cards: list[ModelCard] = field(default_factory=lambda: [CARD])
    is_draining: bool = False
    gate: Gate = field(default_factory=Gate)
    unreached_count: int = 0
    has_view: bool = True

    def models(self) -> list[ModelCard]:
        return self.cards

    def model(self, name: str, tenant: Tenant) -> ModelCard:
        return models_of(*self.cards).find(name, tenant).card

    def vocabulary_of(self, model: str) -> Vocabulary:
        assert model in {card.model for card in self.cards}
        return ByteTokenizer()


def admin_of() -> Admin:
    """An admin API without a token."""
    thresholds = BusyThresholds(AdmissionConfig())
    return Admin(AdminConfig(), models_of(CARD), thresholds, alone(thresholds))


class Outcomes:
    """Records how each request ends, above a layer that can end it from outside, as Observe counts it."""

    def __init__(self, inner: Layer, gate: Gate) -> None:
        self._inner = Accept(inner, gate)
        self.seen: list[Finish | Reason] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            finish = await self._inner(request, call, sink)
        except Failure as failure:
            self.seen.append(failure.reason)
            raise
        self.seen.append(finish)
        return finish


@dataclass
class Server:
    port: int
    session: aiohttp.ClientSession
    metrics: CollectorRegistry
    outcomes: Outcomes
    context: ConnectionContext
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def clients(self) -> Clients:
        """The open connections."""
        return self.context.clients

    async def post(
        self, path: str, body: Any, *, headers: dict[str, str] | None = None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The response to a POST of `body`, as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers=headers) as response:
            return response, await response.read()

    async def get(self, path: str) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.session.get(path) as response:
            return response, await response.read()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection, which is closed before the server."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer


@asynccontextmanager
async def serving(
    pipeline: Any,
    *,
    catalog: StubFrontend | None = None,
    config: HttpConfig | None = None,
    on_refused: Callable[[str, str, Failure], None] = lambda *_: None,
    connections_max: int = 1,
    finder: GenerationFinder | None = None,
    admin: Admin | None = None,
    is_apart: bool = False,
    rpcs: Rpcs | None = None,
    tenant_of: TenantOf | None = None,
    tls: Tls | None = None,
    trusts: ssl.SSLContext | None = None,
    host_rule: HostRule = HostRule(),  # noqa: B008
) -> AsyncIterator[Server]:
    """`finder`: None: no worker has an answer. `is_apart`: serve only admin calls. `rpcs`: served on the same port.

    `tenant_of`: None: clients need no keys. `tls`: serve over TLS, to a session that verifies by `trusts`.
    """
    metrics = CollectorRegistry()
    frontend = catalog or StubFrontend()
    outcomes = Outcomes(pipeline, frontend.gate)
    control = alone(metrics=metrics, gate=frontend.gate)
    config = config or HttpConfig()
    if is_apart:
        assert admin is not None
        app = build_admin_app(admin, frontend, control, config)
    else:
        app = build_app(
            outcomes, frontend, control, config, on_refused, finder or finder_of(), admin, None, tenant_of, host_rule
        )
    async with http_server(app, config, Listen("127.0.0.1:0"), rpcs=rpcs, tls=tls) as listening:
        connector = aiohttp.TCPConnector(limit=connections_max, ssl=True if trusts is None else trusts)
        scheme = "http" if tls is None else "https"
        session = aiohttp.ClientSession(f"{scheme}://127.0.0.1:{listening.port}", connector=connector)
        server = Server(listening.port, session, metrics, outcomes, listening.context)
        try:
            async with session:
                yield server
        finally:
            for writer in server.writers:
                writer.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run the test on a new event loop, and wait until it has left no task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()
            # Client and server each take some iterations of the event loop to close a connection.
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.001)

    run_on_loop(bounded())


async def all_read(server: Server, writer: asyncio.StreamWriter) -> None:
    """Wait until the server has read all that the client has sent. Its connection must be the only one."""
    transport: Any = writer.transport
    while unsent_bytes(transport) or not server.clients._open or unread_size(server):
        await asyncio.sleep(0.001)


def unread_size(server: Server) -> int:
    """Bytes that wait in the kernel for the server to read them."""
    connection: Any
    [connection] = server.clients._open
    transport = connection._transport if isinstance(connection, Detector) else connection.transport
    size = struct.Struct("i")
    waiting = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(size.size))
    return int(size.unpack(waiting)[0])


def raw_post(path: str, body: Any, *, version: str = "1.1", headers: str = "") -> bytes:
    """The bytes of a POST, for tests with a raw connection."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def deaf_client(server: Server, request: bytes) -> Iterator[socket.socket]:
    """A client that sends `request` and does not read."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        client.sendall(request)
        client.setblocking(False)
        yield client


async def bytes_left(client: socket.socket) -> int:
    """How many bytes the client can still read until its connection ends."""
    count = 0
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            count += len(data)
    return count


def error_of(body: bytes, *, has_partial: bool = False) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    names = {"message", "type", "code", "param", "retryable", "hint", "request_id"}
    assert set(error) - {"metadata"} == names | ({"partial"} if has_partial else set())
    return error


def events(body: bytes) -> list[Any]:
    """The events of a stream: JSON, "[DONE]", or ("error", JSON)."""
    assert body.endswith(b"\n\n")
    return [_event(block.decode()) for block in body[:-2].split(b"\n\n")]


def _event(block: str) -> Any:
    *names, data = block.split("\n")
    assert data.startswith("data: ")
    value = data.removeprefix("data: ")
    if value == "[DONE]":
        return value
    if names:
        return names[0].removeprefix("event: "), json.loads(value)
    return json.loads(value)
