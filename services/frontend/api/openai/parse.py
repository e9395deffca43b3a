"""Decodes JSON into the request bodies of OpenAI's endpoints.

Fields that ask for something that this version does not do are refused by name, and so are fields that no API has:
see other_fields.py.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, TypeVar

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder
from msgspec.structs import astuple

from services.core.errors import Failure, quoted
from services.core.json.keys import check_keys
from services.core.json.size import check_size
from services.core.json.text import readable
from services.core.validation import MESSAGES_MAX
from services.frontend.api.openai.bodies import Body, ChatBody, ChatMessage, CompletionBody, Part, StreamOptions
from services.frontend.api.openai.guided import (
    FORMS_OF_TYPES,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
    TgiGrammar,
)
from services.frontend.api.openai.other_fields import (
    IN_CHAT,
    IN_COMPLETION,
    IN_JSON_SCHEMA,
    IN_MESSAGE,
    IN_PART,
    IN_RESPONSE_FORMAT,
    IN_STREAM_OPTIONS,
    IN_STRUCTURED_OUTPUTS,
)
from services.frontend.api.openai.unsupported import UNKNOWN_FIELDS_MAX, FieldCheck, Place
from services.http.json_decode import FIELD_BYTES_MAX, FIELDS, MISSING, decode, fields_of
from services.http.server.config import UnknownFields

B = TypeVar("B", bound=Body)

CHAT = Place(ChatBody.__struct_fields__, IN_CHAT)
COMPLETION = Place(CompletionBody.__struct_fields__, IN_COMPLETION)
MESSAGE = Place(ChatMessage.__struct_fields__, IN_MESSAGE)
PART = Place(Part.__struct_fields__, IN_PART)
STREAM_OPTIONS = Place(StreamOptions.__struct_fields__, IN_STREAM_OPTIONS, is_strict=True)
RESPONSE_FORMAT = Place(ResponseFormat.__struct_fields__, IN_RESPONSE_FORMAT, is_strict=True)
JSON_SCHEMA = Place(JsonSchema.__struct_fields__, IN_JSON_SCHEMA, is_strict=True)
STRUCTURED_OUTPUTS = Place(StructuredOutputs.__struct_fields__, IN_STRUCTURED_OUTPUTS, is_strict=True)
GRAMMAR = Place(TgiGrammar.__struct_fields__, {}, is_strict=True)

PLACES: Mapping[str, Place] = {
    "ChatBody": CHAT,
    "CompletionBody": COMPLETION,
    "ChatMessage": MESSAGE,
    "Part": PART,
    "StreamOptions": STREAM_OPTIONS,
    "ResponseFormat": RESPONSE_FORMAT,
    "JsonSchema": JSON_SCHEMA,
    "StructuredOutputs": STRUCTURED_OUTPUTS,
    "TgiGrammar": GRAMMAR,
}
"""All of them, by the name of the struct."""


class _KnownStreamOptions(StreamOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options without other fields."""


class _KnownCompletion(CompletionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body without other fields."""

    stream_options: _KnownStreamOptions | None = None


class _KnownPart(Part, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A part without other fields."""


class _KnownMessage(ChatMessage, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A message without other fields, in its parts as well."""

    content: str | list[_KnownPart] | None = None  # type: ignore[assignment]


class _KnownChat(ChatBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body without other fields, in its messages as well."""

    messages: Annotated[list[_KnownMessage], Meta(max_length=MESSAGES_MAX)]  # type: ignore[assignment]
    stream_options: _KnownStreamOptions | None = None


_COMPLETION = Decoder(CompletionBody)
_KNOWN_COMPLETION = Decoder(_KnownCompletion)
_CHAT = Decoder(ChatBody)
_KNOWN_CHAT = Decoder(_KnownChat)
_OBJECTS = Decoder(list[dict[str, Raw]])
_ITEMS = Decoder(list[Raw])
_IN_MESSAGE = re.compile(r"messages\[(?P<index>\d+)\]\.(?P<name>\w+)")


def parse_completion(body: bytes, *, unknown_fields: UnknownFields = "refuse-misspelt") -> CompletionBody:
    """The body of POST /v1/completions. `unknown_fields`: see HttpConfig. Raises Failure(INVALID_ARGUMENT)."""
    check_size(body)
    if (known := _known(body, _KNOWN_COMPLETION)) is not None:
        return known
    body = readable(body)
    given = fields_of(body, large={"prompt", "generated_token_ids"})
    with _guessing(given, COMPLETION):
        parsed = decode(body, _COMPLETION)
    _check(given, parsed, COMPLETION, FieldCheck(unknown_fields))
    return parsed


def parse_chat(body: bytes, *, unknown_fields: UnknownFields = "refuse-misspelt") -> ChatBody:
    """The body of POST /v1/chat/completions. `unknown_fields`: see HttpConfig. Raises Failure(INVALID_ARGUMENT)."""
    check_size(body)
    if (known := _known(body, _KNOWN_CHAT)) is not None:
        return known
    body = readable(body)
    given = fields_of(body, large={"messages", "generated_token_ids"})
    with _guessing(given, CHAT):
        parsed = decode(body, _CHAT)
    fields = FieldCheck(unknown_fields)
    _check(given, parsed, CHAT, fields)
    _check_messages(given["messages"], parsed.messages, fields)
    return parsed


@contextmanager
def _guessing(given: Mapping[str, Raw], place: Place) -> Iterator[None]:
    """Add to the refusal of a body without a required field which other field was probably meant to be it."""
    try:
        yield
    except Failure as failure:
        if not failure.detail.endswith(MISSING) or failure.param is None:
            raise
        name, found = failure.param, _IN_MESSAGE.fullmatch(failure.param)
        if found is not None:
            given, place, name = _fields(decode(given["messages"], _ITEMS)[int(found["index"])]), MESSAGE, found["name"]
        for wrong in sorted(given.keys() - place.honoured - place.others.keys())[:UNKNOWN_FIELDS_MAX]:
            if place.meant_by(wrong, given) == name:
                failure.detail += f". Did you mean {name} by {quoted(wrong)}?"
                break
        raise


def _known(body: bytes, decoder: Decoder[B]) -> B | None:
    """Decodes a body that has supported fields alone, as most have: one pass. None: check it field by field."""
    if len(body) > FIELD_BYTES_MAX:
        return None
    try:
        body.decode()  # As in `fields_of`.
        parsed = decoder.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None  # Checking field by field finds what is wrong.
    if not (parsed.structured_outputs is None and parsed.response_format is None and _is_text(parsed.grammar)):
        return None
    check_keys(body, distinct=_key_count(parsed))
    return parsed


def _is_text(grammar: str | TgiGrammar | None) -> bool:
    return grammar is None or isinstance(grammar, str)


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


def _check(given: Mapping[str, Raw], parsed: Body, place: Place, fields: FieldCheck) -> None:
    """Check the fields of a body and of the objects in it that are not messages."""
    fields.check(given, place)
    if parsed.stream_options is not None:
        fields.check(_fields(given["stream_options"]), STREAM_OPTIONS, path="stream_options.")
    if parsed.structured_outputs is not None:
        fields.check(_fields(given["structured_outputs"]), STRUCTURED_OUTPUTS, path="structured_outputs.")
    if not _is_text(parsed.grammar):
        fields.check(_fields(given["grammar"]), GRAMMAR, path="grammar.")
    form = parsed.response_format
    if form is not None and form.type in FORMS_OF_TYPES:  # Other types are refused as such.
        of_form = _fields(given["response_format"])
        fields.check(of_form, RESPONSE_FORMAT, path="response_format.")
        if form.json_schema is not None:
            fields.check(_fields(of_form["json_schema"]), JSON_SCHEMA, path="response_format.json_schema.")


def _check_messages(given: Raw, parsed: list[ChatMessage], fields: FieldCheck) -> None:
    for i, (of_message, message) in enumerate(zip(_objects(given), parsed, strict=True)):
        fields.check(of_message, MESSAGE, path=f"messages[{i}].")
        if isinstance(message.content, str | None):
            continue
        for j, (of_part, part) in enumerate(zip(_objects(of_message["content"]), message.content, strict=True)):
            if part.type == "text":  # Other types are refused as such.
                fields.check(of_part, PART, path=f"messages[{i}].content[{j}].")


def _fields(given: Raw) -> dict[str, Raw]:
    return decode(given, FIELDS)


def _objects(given: Raw) -> list[dict[str, Raw]]:
    return decode(given, _OBJECTS)
