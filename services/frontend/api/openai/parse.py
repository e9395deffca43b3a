"""Decodes JSON into the request bodies of OpenAI's endpoints.

Unknown fields are ignored. Known fields that this version does not support are refused: see
unsupported.py.
"""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import astuple

from services.core.json.keys import check_keys
from services.core.json.text import readable
from services.core.validation import MESSAGES_MAX
from services.frontend.api.openai.bodies import Body, ChatBody, ChatMessage, CompletionBody
from services.frontend.api.openai.unsupported import (
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_COMPLETION,
    NEUTRAL_IN_MESSAGE,
    NEUTRAL_IN_STRUCTURED_OUTPUTS,
    Neutral,
    refuse_unsupported,
)
from services.http.json_decode import FIELD_BYTES_MAX, FIELDS, decode, fields_of

B = TypeVar("B", bound=Body)


class _KnownCompletion(CompletionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body without other fields."""


class _KnownMessage(ChatMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A message without other fields."""


class _KnownChat(ChatBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body without other fields, in its messages as well."""

    messages: Annotated[list[_KnownMessage], Meta(max_length=MESSAGES_MAX)]  # type: ignore[assignment]


_COMPLETION = Decoder(CompletionBody)
_KNOWN_COMPLETION = Decoder(_KnownCompletion)
_CHAT = Decoder(ChatBody)
_KNOWN_CHAT = Decoder(_KnownChat)
_MESSAGES = Decoder(list[dict[str, Raw]])


def parse_completion(body: bytes) -> CompletionBody:
    """The body of POST /v1/completions. Raises Failure(INVALID_ARGUMENT)."""
    if (known := _known(body, _KNOWN_COMPLETION)) is not None:
        return known
    body = readable(body)
    given = fields_of(body, large={"prompt"})
    parsed = decode(body, _COMPLETION)
    _refuse(parsed, given, NEUTRAL_IN_COMPLETION)
    return parsed


def parse_chat(body: bytes) -> ChatBody:
    """The body of POST /v1/chat/completions. Raises Failure(INVALID_ARGUMENT)."""
    if (known := _known(body, _KNOWN_CHAT)) is not None:
        return known
    body = readable(body)
    given = fields_of(body, large={"messages"})
    parsed = decode(body, _CHAT)
    _refuse(parsed, given, NEUTRAL_IN_CHAT)
    messages = decode(given["messages"], _MESSAGES)
    for i, message in enumerate(messages):
        refuse_unsupported(message, NEUTRAL_IN_MESSAGE, path=f"messages[{i}].")
    return parsed


def _known(body: bytes, decoder: Decoder[B]) -> B | None:
    """Decodes a body that has supported fields alone, as most have: one pass. None: check it field by field."""
    if len(body) > FIELD_BYTES_MAX:
        return None
    try:
        body.decode()  # As in `fields_of`.
        parsed = decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None  # Checking field by field finds what is wrong.
    if parsed.structured_outputs is not None:
        return None
    check_keys(body, distinct=_key_count(parsed))
    return parsed


def _key_count(parsed: Body) -> int:
    """The keys that have a value, in the objects of which most bodies consist."""
    count = _value_count(parsed)
    if parsed.stream_options is not None:
        count += _value_count(parsed.stream_options)
    if isinstance(parsed, ChatBody):
        count += sum([1 if message.content is None else 2 for message in parsed.messages])
    return count


def _value_count(fields: Struct) -> int:
    values = astuple(fields)
    return len(values) - values.count(None)


def _refuse(parsed: Body, given: Mapping[str, Raw], neutral: Neutral) -> None:
    refuse_unsupported(given, neutral)
    if parsed.structured_outputs is not None:
        fields = decode(given["structured_outputs"], FIELDS)
        refuse_unsupported(fields, NEUTRAL_IN_STRUCTURED_OUTPUTS, path="structured_outputs.")
