"""Keeps the answer to a request that asks for it, when its client leaves or this frontend dies."""

from services.core.call import Call
from services.core.errors import invalid
from services.core.generation.presentation import PRESENTATION_BYTES_MAX, encode_presentation
from services.core.generation.wish import ON_DISCONNECT
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request


class Keep:
    """Below Preprocess: what is kept has token ids, limits and seed. Above Prompts: an answer is resumed as a whole.

    Workers keep each choice as they run it. This layer gives them what another frontend needs for the whole answer, and
    lets go of the choices that have ended once the last one has.
    """

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        kept = call.kept
        if kept is None:
            return await self._inner(request, call, sink)
        generation = kept.generation
        if not generation.is_resumed:
            generation.presentation = _presentation(request, call, kept.form)
        call.told.generation_id = generation.name
        try:
            return await self._inner(request, call, sink)
        finally:
            generation.release()


def _presentation(request: Request, call: Call, form: bytes) -> bytes:
    """Raises INVALID_ARGUMENT for a request that is too large to keep: each of its prompts carries all of it."""
    presentation = encode_presentation(request, call, form)
    if len(presentation) * max(len(request.parts), 1) > PRESENTATION_BYTES_MAX:
        detail = (
            f"the prompts are too large to be kept ({len(presentation)} bytes): send fewer of them in one request, or "
            f"leave out {ON_DISCONNECT}"
        )
        raise invalid(ON_DISCONNECT, detail)
    return presentation
