"""The gRPC service `Inference` of frontends and workers. It serves any pipeline.

Its handlers are coroutines, not generators: when the client hangs up, a coroutine is cancelled in its own frame, and
with it the pipeline.
"""

from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from services.core.call import DEADLINE_ROUNDING, DEADLINE_TRAVEL_S, Call, new_request_id
from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason, invalid
from services.core.flow.client_flow import ClientBounds
from services.core.gate import Gate
from services.core.generation.cursor import parse_cursor
from services.core.generation.presentation import Finder, resumed_call
from services.core.generation.wish import ON_DISCONNECT, KeepConfig, kept_of, parse_generation_id
from services.core.interface import Layer
from services.core.request import Request
from services.core.tenant import Tenant
from services.core.validation import MIGRATION_LIMIT, checked_request_id, migration_limit_of, timeout_s_of
from services.rpc.codec import request_from_wire
from services.rpc.context import Context
from services.rpc.stream_writer import StreamWriter
from services.runtime.loop import clock
from services.stubs import inference_pb2, inference_pb2_grpc

GENERATE, RESUME = "generate", "resume"
"""Endpoints, as outcomes are counted."""
_ENDPOINTS = {"/unbroken.v1.Inference/Generate": GENERATE, "/unbroken.v1.Inference/Resume": RESUME}
DEFAULT_BOUNDS = ClientBounds()
DEFAULT_KEEP = KeepConfig()


def request_id_of(given: str) -> str:
    """The request id that the client gave, or a new one. Raises INVALID_ARGUMENT for an id that cannot be logged."""
    return checked_request_id(given) if given else new_request_id()


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves one pipeline."""

    def __init__(
        self,
        pipeline: Layer,
        gate: Gate,
        on_refused: Callable[[str, str, Failure], None] = lambda *_: None,
        bounds: ClientBounds = DEFAULT_BOUNDS,
        cancel: Callable[[str, Tenant], Awaitable[int]] | None = None,
        finder: Finder | None = None,
        keep: KeepConfig = DEFAULT_KEEP,
    ) -> None:
        """`gate`: that of the pipeline. `bounds`: how slowly a client may read.

        `on_refused`: called with endpoint, request id and failure of a request that is refused before the pipeline.
        `cancel`: cancels requests by id instead of the gate, for a frontend. `finder`: finds answers to resume; None:
        no answer is kept. `keep`: what becomes of requests whose clients leave.
        """
        self._pipeline = pipeline
        self._gate = gate
        self._on_refused = on_refused
        self._bounds = bounds
        self._cancel = cancel
        self._finder = finder
        self._keep = keep

    def on_refused(self, path: str, failure: Failure) -> None:
        """Called when an rpc of any service fails before its handler is called: it is an outcome too."""
        if (endpoint := _ENDPOINTS.get(path)) is not None:
            self._on_refused(endpoint, "", failure)

    async def Cancel(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """See inference.proto."""
        request_id, tenant = checked_request_id(request.request_id), context.tenant
        if self._cancel is None:
            return inference_pb2.CancelResponse(cancelled=self._gate.cancel(request_id, tenant))
        return inference_pb2.CancelResponse(cancelled=await self._cancel(request_id, tenant))

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See inference.proto."""
        request_id = ""  # A refused id is not echoed: it may have any size.
        try:
            request_id = request_id_of(request.request_id)
            call = self._call_of(request_id, context, is_id_given=bool(request.request_id))
            asked = request_from_wire(request)
        except Exception as error:
            failure = error if isinstance(error, Failure) else bug_failure(error, request_id)
            self._on_refused(GENERATE, request_id, failure)
            context.fail(failure, request_id)
            return
        del request  # It takes as much memory again as what was read from it, and the answer may take minutes.
        await self._serve(asked, call, context)

    def _call_of(self, request_id: str, context: Context, *, is_id_given: bool) -> Call:
        """The call that the metadata describe. Raises INVALID_ARGUMENT."""
        metadata = _metadata(context)
        kept = kept_of(metadata, request_id, self._keep, context.tenant, is_id_given=is_id_given)
        if kept is not None:
            if self._finder is None:
                raise invalid(ON_DISCONNECT, "a worker that is called directly keeps no answers")
            kept = replace(kept, early_s=_early_s(context))
        return Call(
            request_id=request_id,
            tenant=context.tenant,
            deadline=_deadline(metadata, context),
            migration_limit=migration_limit_of(metadata.get(MIGRATION_LIMIT.lower())),
            kept=kept,
        )

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See inference.proto."""
        try:
            deadline = _deadline(_metadata(context), context)
            generation_id = parse_generation_id(request.generation_id, "generation_id")
            cursor = parse_cursor(request.cursor, "cursor") if request.cursor else None
            if self._finder is None:
                raise Failure(Reason.STREAM_NOT_FOUND, "a worker has no answers to resume: ask a frontend")
            presentation, generation = await self._finder.find(generation_id, context.tenant)
        except Exception as error:
            failure = error if isinstance(error, Failure) else bug_failure(error, "(resume)")
            self._on_refused(RESUME, "", failure)
            context.fail(failure, "")
            return
        call = resumed_call(presentation, generation, cursor, deadline, context.tenant)
        assert call.kept is not None, "what can be found is kept"
        kept = replace(call.kept, early_s=_early_s(context))
        await self._serve(presentation.request, replace(call, is_streamed=True, kept=kept), context)

    async def _serve(self, request: Request, call: Call, context: Context) -> None:
        ending = await self._attempt(request, call, context)
        if ending is not None:
            ending.clear_tracebacks()
            context.fail(ending, call.request_id)

    async def _attempt(self, request: Request, call: Call, context: Context) -> Failure | None:
        """Serve the request. Returns its failure, if it failed."""
        try:
            await StreamWriter(call, context, self._bounds).run(self._pipeline, request)
        except Failure as failure:
            return failure
        except Exception as error:
            return bug_failure(error, call.request_id)
        return None


def _deadline(metadata: Mapping[str, str], context: Context) -> float | None:
    """In event-loop time: the lower one of gRPC's own and that of the metadata. Raises INVALID_ARGUMENT."""
    timeouts_s = [left_s for left_s in (context.time_remaining(), timeout_s_of(metadata)) if left_s is not None]
    return clock() + min(timeouts_s) if timeouts_s else None


def _early_s(context: Context) -> float:
    """How much earlier than here a deadline may pass at the client, which then cancels the rpc.

    gRPC rounds a timeout up to three digits on the wire, and its message takes a while.
    """
    left_s = context.time_remaining()
    return 0.0 if left_s is None else DEADLINE_ROUNDING * left_s + DEADLINE_TRAVEL_S


def _metadata(context: Context) -> dict[str, str]:
    """The metadata that the client sent, in lower case. Values of one key are joined, as in HTTP."""
    metadata: dict[str, str] = {}
    for key, value in context.invocation_metadata():
        if isinstance(value, str):
            metadata[key] = f"{metadata[key]}, {value}" if key in metadata else value
    return metadata
