"""The bytes of the message that nearly every token is: some token ids and a text in ASCII, and nothing else.

To build a protobuf message object by object takes half of what such a message costs. Source: "Encoding", protobuf.dev;
the numbers of the fields are those of inference.proto.
"""

from collections.abc import Sequence
from functools import lru_cache

from services.core.interface import Delta

FIELDS_KEPT = 16_384
"""Encoded positions, and encoded tokens, that are remembered: streams are at positions near each other, and few tokens
make up most text."""
_CHOICE, _POSITION, _TOKEN_IDS, _TEXT = b"\x08", b"\x10", b"\x1a", b"\x22"
_DELTA = b"\x0a"


def common_message(delta: Delta) -> bytes | None:
    """A GenerateResponse with this delta alone, encoded; None: it has more than this function knows."""
    text = delta.text
    if delta.logprobs is not None or delta.finish_reason is not None or delta.usage is not None:
        return None
    if delta.continuation is not None or not text.isascii():
        return None
    token_ids = delta.token_ids
    content = _position(delta.position) + (_token(token_ids[0]) if len(token_ids) == 1 else _tokens(token_ids))
    if delta.choice:
        content = _CHOICE + _varint(delta.choice) + content
    if text:
        content += _TEXT + _varint(len(text)) + text.encode()
    return _DELTA + _varint(len(content)) + content


@lru_cache(FIELDS_KEPT)
def _position(position: int) -> bytes:
    return _POSITION + _varint(position) if position else b""


@lru_cache(FIELDS_KEPT)
def _token(token_id: int) -> bytes:
    """The field of one token alone."""
    return _tokens((token_id,))


def _tokens(token_ids: Sequence[int]) -> bytes:
    encoded = b"".join(map(_varint, token_ids))
    return _TOKEN_IDS + _varint(len(encoded)) + encoded if encoded else b""


@lru_cache(FIELDS_KEPT)
def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
