"""`Inference.Generate` over gRPC, alike on a frontend and on a worker: any pipeline, one handler.

The handler is a coroutine that calls `context.write`, not a generator: on hang-up it is cancelled in its own frame, and
with it the pipeline.
"""

import uuid
from collections.abc import Awaitable, Callable

from grpc_status import rpc_status

from services.core.call import Call
from services.core.client_flow import ClientBounds
from services.core.common_layers import bug_failure
from services.core.errors import Failure
from services.core.gate import Gate
from services.core.interface import Layer
from services.core.request import Request
from services.core.validation import MIGRATION_LIMIT, checked_request_id, migration_limit_of
from services.rpc.codec import request_from_wire
from services.rpc.status import abort, status_of
from services.rpc.stream_writer import Context, StreamWriter
from services.runtime.loop import clock
from services.stubs import inference_pb2, inference_pb2_grpc

DEFAULT_BOUNDS = ClientBounds()


def request_id_of(given: str) -> str:
    """The client's own name for the request, or a new one. Raises INVALID_ARGUMENT for one that can't be logged."""
    return checked_request_id(given) if given else uuid.uuid4().hex


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves a pipeline."""

    def __init__(
        self,
        pipeline: Layer,
        gate: Gate,
        on_refused: Callable[[str, str, Failure], None] = lambda *_: None,
        bounds: ClientBounds = DEFAULT_BOUNDS,
        cancel: Callable[[str], Awaitable[int]] | None = None,
    ) -> None:
        """gate: the pipeline's own. on_refused: told of requests that are too broken for the pipeline. bounds: how
        slowly a client may read. cancel: by name, where there is more than the gate.
        """
        self._pipeline = pipeline
        self._gate = gate
        self._on_refused = on_refused
        self._bounds = bounds
        self._cancel = cancel

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """See inference.proto."""
        try:
            request_id = checked_request_id(request.request_id)
            cancelled = self._gate.cancel(request_id) if self._cancel is None else await self._cancel(request_id)
        except Failure as failure:
            await abort(context, failure)
        return inference_pb2.CancelResponse(cancelled=cancelled)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """See inference.proto."""
        request_id = ""  # One that is refused is not echoed either: it may be of any size.
        try:
            request_id = request_id_of(request.request_id)
            limit = migration_limit_of(_metadata(context).get(MIGRATION_LIMIT.lower()))
            asked = request_from_wire(request)
        except Failure as failure:
            self._on_refused("generate", request_id, failure)
            _end(context, failure, request_id)
            return
        left_s = context.time_remaining()
        deadline = None if left_s is None else clock() + left_s
        call = Call(request_id=request_id, deadline=deadline, migration_limit=limit)
        ending = await self._attempt(asked, call, context)
        if ending is not None:
            ending.clear_tracebacks()
            _end(context, ending, request_id)

    async def _attempt(self, request: Request, call: Call, context: Context) -> Failure | None:
        """Serve the request. Returns what it failed with."""
        try:
            await StreamWriter(call, context, self._bounds).run(self._pipeline, request)
        except Failure as failure:
            return failure
        except Exception as error:
            return bug_failure(error, call.request_id)
        return None


def _metadata(context: Context) -> dict[str, str]:
    """What the client sent beside the request; gRPC's keys are in lower case."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _end(context: Context, failure: Failure, request_id: str) -> None:
    """Have the rpc end with the failure when its handler returns.

    Behind a message that its client does not take the status waits too: gRPC sends it to a client that reads on after
    all, and forgets it with the connection.
    """
    status = rpc_status.to_status(status_of(failure, request_id=request_id))
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(status.trailing_metadata)
