"""What a worker serves to frontends: a session for each, and over gRPC the tokeniser of its model."""

import asyncio

import structlog

from services.core.errors import Failure, Reason, quoted
from services.core.interface import Layer
from services.rpc.codec import card_to_wire, seconds_to_wire
from services.rpc.context import Context
from services.rpc.framing import FrameConnection
from services.runtime.tasks import wait_event
from services.stubs import worker_pb2, worker_pb2_grpc
from services.worker.engine import Engine
from services.worker.execute import Execute
from services.worker.generations.store import GenerationStore
from services.worker.session import FrontendSession, FrontendSessionConfig

log = structlog.get_logger()

PIECE_BYTES = 256 * 1024


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves one engine to any number of frontends. `generations`: enter it before a session is served."""

    def __init__(
        self, instance_id: str, engine: Engine, execute: Execute, pipeline: Layer, config: FrontendSessionConfig
    ) -> None:
        self._instance_id = instance_id
        self._engine = engine
        self._execute = execute
        self._pipeline = pipeline
        self.generations = GenerationStore(pipeline, config.detach)
        self._config = config
        self._sessions: dict[FrontendSession, None] = {}  # In the order in which they began.
        self._frontend_count = 0
        self._has_no_session = asyncio.Event()
        self._has_no_session.set()
        self._grace_s: float | None = None

    def goaway(self, grace_s: float) -> None:
        """Tell all frontends, and those that connect later, that this worker leaves within `grace_s`."""
        self._grace_s = grace_s
        for session in self._sessions:
            session.goaway(grace_s)

    async def end_sessions(self, timeout_s: float) -> None:
        """Wait until all frontends have hung up after the goaway. After `timeout_s`, close the remaining sessions."""
        if not await wait_event(self._has_no_session, timeout_s):
            log.warning("frontends have not hung up", sessions=len(self._sessions), waited_s=timeout_s)
        for session in self._sessions:
            session.end()

    async def attach(self, connection: FrameConnection[worker_pb2.FrontendMessage]) -> None:
        """Serve a session on the connection until its end."""
        self._frontend_count += 1  # Its first message counts the frontend itself.
        session = FrontendSession(
            self._pipeline,
            self._welcome(),
            self.load,
            self._has_requests,
            self._execute.counters,
            self.generations,
            self._config,
        )
        if self._grace_s is not None:
            session.goaway(self._grace_s)
        self._sessions[session] = None
        self._has_no_session.clear()
        try:
            await session.serve(connection)
        finally:
            self._frontend_count -= 1
            self._sessions.pop(session, None)
            if not self._sessions:
                self._has_no_session.set()

    async def FetchTokenizer(  # type: ignore[override]  # noqa: N802
        self, request: worker_pb2.FetchTokenizerRequest, context: Context
    ) -> None:
        """See worker.proto."""
        if request.sha256 != self._engine.card.tokenizer.sha256:
            detail = f"this worker has no tokeniser with checksum {quoted(request.sha256)}"
            raise Failure(Reason.MODEL_NOT_FOUND, detail)
        content = self._engine.tokenizer_content()
        for start in range(0, len(content), PIECE_BYTES):
            await context.write(worker_pb2.FetchTokenizerResponse(data=content[start : start + PIECE_BYTES]))

    def _has_requests(self) -> bool:
        """Whether the worker has requests, of any frontend. Asked at every heartbeat of every session."""
        return self._execute.running_count + self._execute.waiting_count > 0

    def load(self) -> worker_pb2.Load:
        """The load of the worker, as of now."""
        load, service_time_s = self._engine.load(), self._execute.service_time_s
        return worker_pb2.Load(
            running=self._execute.running_count,
            waiting=self._execute.waiting_count,
            engine_steps=load.steps,
            ranks=[
                worker_pb2.RankLoad(
                    kv_blocks_used=rank.kv_blocks_used,
                    kv_blocks_total=rank.kv_blocks_total,
                    active_prefill_tokens=rank.active_prefill_tokens,
                    dp_rank=rank.dp_rank,
                )
                for rank in load.ranks
            ],
            generations=self.generations.running_count,
            frontends=self._frontend_count,
            service_time=None if service_time_s is None else seconds_to_wire(service_time_s),
        )

    def _welcome(self) -> worker_pb2.Welcome:
        welcome = worker_pb2.Welcome(
            instance_id=self._instance_id,
            card=card_to_wire(self._engine.card),
            engine_request_limit=self._execute.limits.slots,
            request_queue_limit=self._execute.limits.places,
            heartbeat=seconds_to_wire(self._config.heartbeat_s),
        )
        if (limit := self._config.migration_limit) is not None:
            welcome.card.migration_limit = limit
        return welcome
