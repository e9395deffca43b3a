"""What a worker keeps of an answer for the frontend that resumes it: the request as it was prepared, and its form."""

from typing import Protocol

import msgspec
from msgspec import Struct

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor
from services.core.generation.kept import Generation, Kept
from services.core.request import Request
from services.core.tenant import Tenant
from services.core.validation import ANSWERS_MAX

PRESENTATION_BYTES_MAX = 1024 * 1024
"""The largest size of a presentation, times the prompts of its request: each prompt's submit has all of it."""


class Presentation(Struct, frozen=True, kw_only=True):
    """`request`: below `Preprocess`. `form`: of the API that presents the answer. For the others see `Call`."""

    request: Request
    request_id: str
    endpoint: str
    is_streamed: bool
    counts_prompt: bool
    migration_limit: int | None
    grace_s: float
    form: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Presentation).decode


def encode_presentation(request: Request, call: Call, form: bytes) -> bytes:
    """Encode what `decode_presentation` returns."""
    assert call.kept is not None
    presentation = Presentation(
        request=request,
        request_id=call.request_id,
        endpoint=call.endpoint,
        is_streamed=call.is_streamed,
        counts_prompt=call.counts_prompt,
        migration_limit=call.migration_limit,
        grace_s=call.kept.generation.grace_s,
        form=form,
    )
    return _encode(presentation)


def decode_presentation(encoded: bytes) -> Presentation:
    """Decode a presentation. Raises PROTOCOL_VIOLATION if it is that of another version."""
    try:
        presentation: Presentation = _decode(encoded)
    except msgspec.MsgspecError as error:
        raise other_version() from error
    if not _is_prepared(presentation.request):
        raise Failure(Reason.PROTOCOL_VIOLATION, "the worker has no request that a frontend has prepared")
    return presentation


def _is_prepared(request: Request) -> bool:
    """Whether the request is one below `Preprocess`."""
    prompts = request.parts or (request,)
    return 0 < request.n * len(prompts) <= ANSWERS_MAX and all(
        one.token_ids is not None and one.stop.max_tokens is not None and len(one.generated_choices) in (0, request.n)
        for one in prompts
    )


def other_version() -> Failure:
    """The failure of a resume whose presentation or form cannot be read."""
    detail = "the answer was begun by a frontend of another version, and cannot be resumed by this one"
    return Failure(Reason.PROTOCOL_VIOLATION, detail)


class Finder(Protocol):
    """Finds answers that can be resumed, wherever they are."""

    async def find(self, generation_id: bytes, tenant: Tenant) -> tuple[Presentation, Generation]:
        """What is known of the tenant's answer. Raises STREAM_NOT_FOUND, STREAM_EXPIRED or NO_WORKERS."""
        ...


def resumed_call(
    presentation: Presentation, generation: Generation, cursor: Cursor | None, deadline: float | None, tenant: Tenant
) -> Call:
    """The call of an answer that was found. `cursor`: how far its client is."""
    return Call(
        request_id=presentation.request_id,
        tenant=tenant,
        deadline=deadline,
        endpoint=presentation.endpoint,
        is_streamed=presentation.is_streamed,
        counts_prompt=presentation.counts_prompt,
        migration_limit=presentation.migration_limit,
        kept=Kept(generation=generation, form=presentation.form, cursor=cursor),
    )
