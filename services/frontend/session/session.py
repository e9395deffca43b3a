"""The frontend's end of one session: all requests to one worker on one connection, and the proof that the worker lives.

| event on the session | its streams fail with | the session ends with |
| --- | --- | --- |
| the worker cannot be reached | – | CANNOT_CONNECT |
| no welcome comes within `connect_timeout_s` | – | CANNOT_CONNECT |
| the connection ends before a welcome | – | CANNOT_CONNECT |
| the handshake of TLS fails, or the peer has not the role of a worker | – | CANNOT_CONNECT |
| the first message is no welcome | – | CANNOT_CONNECT |
| the first message is a refusal | – | CANNOT_CONNECT |
| the welcome is another worker's | – | CANNOT_CONNECT |
| the connection ends | DISCONNECTED | DISCONNECTED |
| the connection ends after a goaway | STREAM_INCOMPLETE | STREAM_INCOMPLETE |
| the connection ends after a goaway, without streams | – | DRAINING |
| no stream is left after a goaway: the frontend hangs up | – | DRAINING |
| the worker exceeds a limit of `liveness.py` | STALLED | STALLED |
| a message cannot be decoded | PROTOCOL_VIOLATION | PROTOCOL_VIOLATION |
| the columns of a step have unequal lengths | PROTOCOL_VIOLATION | PROTOCOL_VIOLATION |
| an item follows the `complete_final` of its stream | PROTOCOL_VIOLATION | PROTOCOL_VIOLATION |
| an item breaks the rules of one stream | PROTOCOL_VIOLATION, that stream alone | – |
| no `complete_final` follows a finish reason within `COMPLETION_S_MAX` | – | – |
| what the worker said to have of an adopted stream does not come | STALLED, that stream alone | – |
| the frontend closes the session | DISCONNECTED | DISCONNECTED |

A stream that has its finish reason ends well, whatever happens to the session before `complete_final`.
`COMPLETION_S_MAX` is in `stream_table.py`, and `ADOPTION_S_MAX`, how long an adopted stream may pause.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import structlog

from services.core.call import Call
from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.interface import Sink
from services.core.model_card import ModelCard
from services.core.request import Request
from services.discovery.client import InstanceRecord
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.capacity import FULL_S
from services.frontend.session.generations import SessionGenerations
from services.frontend.session.leftovers import Leftovers
from services.frontend.session.liveness import Liveness, LivenessConfig
from services.frontend.session.reader import ReadThrottle, SessionReader
from services.frontend.session.stream import Stream
from services.frontend.session.stream_table import StreamTable
from services.frontend.session.writer import CancelCounts, SessionWriter
from services.http.server.cork import Cork
from services.rpc.codec import card_from_wire, seconds_from_wire
from services.rpc.framing import FrameConnection
from services.rpc.secure.sessions import connect
from services.runtime.address import split_address
from services.runtime.listen import bare_host
from services.stubs import worker_pb2
from services.tls.peers import Peers

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSessionConfig(LivenessConfig):
    """`connect_timeout_s`: from the start of the connection to the welcome.

    `full_s`: how long a refusal for capacity counts, unless a load report or the end of a stream comes first.
    """

    connect_timeout_s: float = 2.0
    full_s: float = FULL_S


def _ignore(_: Candidate) -> None:
    """For a session outside a pool."""


class WorkerSession:
    """One session to one worker. `run` opens it, once: a reconnect is a new session.

    `migration_limit`: see `RoutedSession`; known since the welcome.
    """

    _numbers = count(1)

    def __init__(
        self,
        record: InstanceRecord,
        config: WorkerSessionConfig,
        on_change: Callable[[Candidate], None] = _ignore,
        cancels: CancelCounts | None = None,
        throttle: ReadThrottle | None = None,
        cork: Cork | None = None,
        leftovers: Leftovers | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`on_change`: see `Candidate`. `cork`: see `SessionReader`. `leftovers`: of all sessions. `peers`: for TLS."""
        self._clock = clock = asyncio.get_running_loop().time
        cancels = cancels or CancelCounts()
        self.record = record
        self.name = f"worker {record.instance_id}"
        self.key = f"{record.instance_id}#{next(self._numbers)}"
        self.candidate = Candidate(self, record.instance_id, full_s=config.full_s, on_change=on_change, clock=clock)
        self._card: ModelCard | None = None
        self.migration_limit: int | None = None
        self._config = config
        self._reader = SessionReader(self._handle, throttle or ReadThrottle(), cork or Cork())
        self._writer = SessionWriter(cancels)
        self._streams = StreamTable(self._writer, self.candidate, cancels)
        self.generations = SessionGenerations(self._streams, self._writer)
        self.leftovers = leftovers or Leftovers()
        self._peers = peers
        self._liveness = Liveness(self.name, config, clock)
        self._loss: Failure | None = None
        self._has_hung_up = False
        self._has_begun = asyncio.Event()  # Welcomed, or lost.
        self._has_ended = asyncio.Event()

    @property
    def card(self) -> ModelCard:
        """The worker's model card. Do not read it before the welcome."""
        assert self._card is not None, "no welcome yet"
        return self._card

    def set_card(self, card: ModelCard) -> None:
        """Replace the card by an equal object, the catalogue's own: routing compares cards by identity."""
        assert card == self._card
        self._card = card

    @property
    def is_lost(self) -> bool:
        """Whether the session has ended."""
        return self._loss is not None

    # Requests

    def open(self, request: Request, call: Call, sink: Sink) -> Stream:
        """Send the request: see `StreamTable.open`. Raises CANNOT_CONNECT if the session is lost."""
        return self._opened(self._streams.open, request, call, sink)

    def adopt(self, request: Request, call: Call, sink: Sink) -> Stream:
        """Take over a request that the worker has: see `StreamTable.adopt`. Raises CANNOT_CONNECT as `open`."""
        return self._opened(self._streams.adopt, request, call, sink)

    def _opened(
        self, open_: Callable[[Request, Call, Sink, int], Stream], request: Request, call: Call, sink: Sink
    ) -> Stream:
        if self.is_lost:
            raise Failure(Reason.CANNOT_CONNECT, f"the session to {self.name} is over")
        was_idle = not self._streams.has_unfinished
        stream = open_(request, call, sink, self.card.vocab_size)
        if was_idle and self._streams.has_unfinished:
            self._liveness.restart(self._clock())  # An idle worker was allowed a longer silence.
        return stream

    def close(self, stream: Stream, *, has_record: bool = False) -> None:
        """See `StreamTable.close`."""
        self._streams.close(stream, has_record=has_record and not self.is_lost)
        self._hang_up_if_left()

    def stop(self, stream: Stream) -> None:
        """See `StreamTable.stop`."""
        if not self.is_lost:
            self._streams.stop(stream)
            self._hang_up_if_left()

    def let_go(self, stream: Stream) -> None:
        """See `StreamTable.let_go`."""
        if not self.is_lost:
            self._streams.let_go(stream)
            self._hang_up_if_left()

    # The connection

    async def run(self, on_welcome: asyncio.Event) -> None:
        """Open the session, set `on_welcome`, and keep the session until it is lost. Raises the failure of the loss."""
        connection = FrameConnection(worker_pb2.WorkerMessage, is_opener=True)
        try:
            await self._connect(connection)
            on_welcome.set()
            await self._has_ended.wait()
            raise self._loss or AssertionError("lose sets both")
        finally:
            self.lose(Failure(Reason.DISCONNECTED, "the frontend closed the session"))
            if self._has_hung_up:
                connection.close()
            else:
                connection.abort()

    async def _connect(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        """Connect and wait for the welcome. Raises CANNOT_CONNECT."""
        awaited = "connection to"
        try:
            host, port = split_address(self.record.sessions_at)
            async with asyncio.timeout(self._config.connect_timeout_s):
                await connect(connection, bare_host(host), port, self._peers)
                awaited = "welcome from"
                self._start(connection)
                await self._has_begun.wait()
        except TimeoutError:
            detail = f"no {awaited} {self.name} within {self._config.connect_timeout_s:g} s"
            raise Failure(Reason.CANNOT_CONNECT, detail) from None
        except (OSError, ValueError) as error:  # ValueError: the registered address has no valid host name.
            why = getattr(error, "strerror", None) or error  # An error about several addresses has no `strerror`.
            raise Failure(Reason.CANNOT_CONNECT, f"{self.name} cannot be reached: {why}") from error
        if self._card is None:
            assert self._loss is not None, "without a welcome it is lost"
            why = self._loss.detail
            if self._loss.reason is Reason.PROTOCOL_VIOLATION:
                why = f"the peer does not speak the session protocol: is this the worker's session address? ({why})"
            raise Failure(Reason.CANNOT_CONNECT, f"no welcome: {why}") from self._loss

    def _start(self, connection: FrameConnection[worker_pb2.WorkerMessage]) -> None:
        self._reader.connect(connection)
        self._writer.connect(connection)
        connection.start(
            on_messages=self._reader.on_messages, on_writable=self._writer.send, on_lost=self._on_connection_lost
        )

    def _on_connection_lost(self, failure: Failure) -> None:
        if self._card is None:  # `_connect` reports it.
            self.lose(failure)
            return
        has_left = self.candidate.is_draining and failure.reason is Reason.DISCONNECTED
        if has_left and not self._streams:
            self.lose(self._departure())
            return
        log.info("connection broke", worker=self.name, why=failure.detail)
        reason = Reason.STREAM_INCOMPLETE if has_left else failure.reason
        self.lose(Failure(reason, f"the connection to {self.name} broke"))

    # The worker's messages

    def _handle(self, message: worker_pb2.WorkerMessage) -> bool:
        """Process one message. Returns False once the session is lost and needs no more messages."""
        self._liveness.on_message()
        try:
            if self._loss is None:
                self._dispatch(message)
        except Failure as failure:
            self.lose(failure)
        except Exception as error:
            self.lose(bug_failure(error, f"(any) on the session to {self.name}"))
        return self._loss is None

    def _dispatch(self, message: worker_pb2.WorkerMessage) -> None:
        """Process the parts of a message in the order that worker.proto prescribes."""
        if self._card is None:
            self._on_welcome(message)
        if message.HasField("load"):
            self._liveness.on_load(message.load)
            self.candidate.on_load(message.load)
        if message.begun:
            self._streams.on_begun(message.begun)
        if message.HasField("step"):
            self._liveness.on_step()
            self._streams.on_step(message.step)
        for end in message.ends:
            self._streams.on_end(end)
        for located in message.located:
            self.generations.on_located(located)
        if message.HasField("goaway"):
            self.candidate.on_draining()
            self._streams.on_goaway(seconds_from_wire(message.goaway.grace))
        self._hang_up_if_left()

    def _on_welcome(self, message: worker_pb2.WorkerMessage) -> None:
        if not message.HasField("welcome"):
            raise _no_welcome(message, self.name)
        if (other := message.welcome.instance_id) != self.record.instance_id:  # A later worker has the address.
            raise Failure(Reason.CANNOT_CONNECT, f"{self.name} is gone: worker {other} answers at its address")
        card = message.welcome.card
        self._card = card_from_wire(card)
        self.migration_limit = card.migration_limit if card.HasField("migration_limit") else None
        self.candidate.on_welcome(message.welcome)
        self._has_begun.set()

    # Loss

    def _hang_up_if_left(self) -> None:
        """Hang up if the worker leaves and no stream is left: it waits for that, since a request may be on its way.

        While it runs requests whose answers outlive their frontends, this frontend may have to take one over.
        """
        is_needed = not self._streams.is_done or self._liveness.generation_count
        if self.candidate.is_draining and not is_needed and not self.is_lost:
            self._has_hung_up = True
            self.lose(self._departure())

    def _departure(self) -> Failure:
        return Failure(Reason.DRAINING, f"{self.name} left as announced")

    def check(self, now: float) -> float:
        """Send a keepalive if one is due, end streams that lack `complete_final` or do not come although they were
        adopted, and lose the session if the worker exceeds a limit of `Liveness`.

        Returns the time of the next limit: check again at that time, or earlier. Times are in event-loop time.
        """
        self._writer.keep_alive(now)
        stream_limit_at = self._streams.check(now)
        self._hang_up_if_left()
        if self.is_lost:
            return math.inf
        try:
            lost_at = self._liveness.check(
                now, has_streams=self._streams.has_unfinished, stuck_at=self._writer.stuck_at()
            )
        except Failure as failure:
            self.lose(failure)
            return math.inf
        return min(stream_limit_at, lost_at)

    def forgive(self, now: float) -> None:
        """Ignore silence until `now`: the frontend itself was late, so it proves nothing."""
        self._liveness.restart(now)
        self._streams.forgive(now)

    def lose(self, failure: Failure) -> None:
        """End the session: every stream fails at once. Idempotent; the first failure counts."""
        if self._loss is not None:
            return
        self._loss = failure
        self._has_begun.set()
        self._has_ended.set()
        self.candidate.on_lost()
        self.generations.on_lost()
        self._streams.fail_all(failure)


def _no_welcome(message: worker_pb2.WorkerMessage, name: str) -> Failure:
    """Why a worker began with another message than a welcome."""
    if message.refusal:
        return Failure(Reason.CANNOT_CONNECT, f"{name} refuses the session: {message.refusal}")
    return Failure(Reason.PROTOCOL_VIOLATION, f"{name} did not begin with a welcome")
