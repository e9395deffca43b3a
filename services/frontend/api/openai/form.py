"""What a worker keeps of the form of an answer, so that another frontend can go on presenting it."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from services.core.call import Told
from services.core.errors import Failure, Reason
from services.core.generation.presentation import Presentation, other_version
from services.core.generation.resumption import bases_of
from services.frontend.api.openai.responses import Answer, Brought, ChatAnswer, CompletionAnswer, Echo
from services.models.tokenizers import Vocabulary

_ANSWERS: dict[str, type[Answer]] = {"completions": CompletionAnswer, "chat_completions": ChatAnswer}


class _Form(Struct, frozen=True, kw_only=True):
    """The fields of `Answer`. `echoed`: the texts of the prompts, if the answer begins with them."""

    request_id: str
    model: str
    n: int
    includes_usage: bool
    returns_token_ids: bool
    has_usage_in_events: bool
    created: int
    echoed: tuple[str, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Form).decode


def encode_form(answer: Answer) -> bytes:
    """Encode the form of an answer, for `decode_form`."""
    return _encode(
        _Form(
            request_id=answer.request_id,
            model=answer.model,
            n=answer.n,
            returns_token_ids=answer.returns_token_ids,
            includes_usage=answer.includes_usage,
            has_usage_in_events=answer.has_usage_in_events,
            created=answer.created,
            echoed=() if answer.echo is None else tuple(answer.echo.texts()),
        )
    )


def decode_form(
    presentation: Presentation, generation_id: str, told: Told, vocabulary: Callable[[], Vocabulary]
) -> Answer:
    """The answer to present. `told`: of its call.

    Raises INVALID_ARGUMENT if it was not begun on an OpenAI endpoint, and as `decode_presentation`.
    """
    answer_type = _ANSWERS.get(presentation.endpoint)
    if answer_type is None:
        detail = "this answer was begun over gRPC: resume it with Inference.Resume"
        raise Failure(Reason.INVALID_ARGUMENT, detail, param="id")
    try:
        form, request = _decode(presentation.form), presentation.request
    except msgspec.MsgspecError as error:
        raise other_version() from error
    return answer_type(
        request_id=form.request_id,
        model=form.model,
        n=form.n,
        returns_token_ids=form.returns_token_ids,
        told=told,
        brought=Brought(request) if any(bases_of(request)) else None,
        generation_id=generation_id,
        includes_usage=form.includes_usage or not presentation.is_streamed,  # A whole answer always has it.
        has_usage_in_events=form.has_usage_in_events,
        echo=Echo(request, vocabulary, form.echoed) if form.echoed else None,
        created=form.created,
    )
