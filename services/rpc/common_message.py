"""The bytes of the message that nearly every token is: some token ids and a text in ASCII, and nothing else.

To build a protobuf message object by object takes half of what such a message costs. Source: "Encoding", protobuf.dev;
the numbers of the fields are those of inference.proto.
"""

from services.core.interface import Delta

_CHOICE, _POSITION, _TOKEN_IDS, _TEXT = b"\x08", b"\x10", b"\x1a", b"\x22"
_DELTA = b"\x0a"
_SMALL = [bytes((number,)) for number in range(0x80)]


def common_message(delta: Delta) -> bytes | None:
    """A GenerateResponse with this delta alone, encoded; None: it has more than this function knows."""
    text = delta.text
    if delta.logprobs is not None or delta.finish_reason is not None or delta.usage is not None:
        return None
    if delta.continuation is not None or not text.isascii():
        return None
    token_ids = b"".join(map(_varint, delta.token_ids))
    content = _CHOICE + _varint(delta.choice) if delta.choice else b""
    if delta.position:
        content += _POSITION + _varint(delta.position)
    if token_ids:
        content += _TOKEN_IDS + _varint(len(token_ids)) + token_ids
    if text:
        content += _TEXT + _varint(len(text)) + text.encode("ascii")
    return _DELTA + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number < 0x200000:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
