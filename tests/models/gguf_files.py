"""GGUF vocabularies for tests: the one of the cached model, with other metadata."""

import struct
from functools import cache

from services.models.download import resolve

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by type. Source: the GGUF specification."""
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@cache
def smollm_content() -> bytes:
    """The head of the cached model's file, as a worker sends it."""
    from services.models.tokenizers.gguf import tokenizer_content

    return tokenizer_content(resolve("smollm2"))


@cache
def content_split_by(splitter: str) -> bytes:
    """The same vocabulary with another `tokenizer.ggml.pre`."""
    return with_string(smollm_content(), "tokenizer.ggml.pre", splitter)


def with_string(head: bytes, key: str, value: str) -> bytes:
    """The head of a GGUF file with another value of one of its strings."""
    _, _, tensors, values = struct.unpack_from("<4sIQQ", head, 0)
    parts, at = [head[:24]], 24
    for _ in range(values):
        begin = at
        name, at = _string(head, at)
        value_at = at + 4
        (kind,) = struct.unpack_from("<I", head, at)
        at = _after(head, kind, value_at)
        if name == key.encode():
            parts.append(head[begin:value_at] + struct.pack("<Q", len(value)) + value.encode())
        else:
            parts.append(head[begin:at])
    begin = at
    for _ in range(tensors):
        _, at = _string(head, at)
        (dimensions,) = struct.unpack_from("<I", head, at)
        at += 4 + 8 * dimensions + 4 + 8
    changed = b"".join([*parts, head[begin:at]])
    return changed + bytes(-len(changed) % _ALIGNMENT)


def _string(head: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", head, at)
    return head[at + 8 : at + 8 + size], at + 8 + size


def _after(head: bytes, kind: int, at: int) -> int:
    """Where the value that begins at `at` ends."""
    if kind == _STRING:
        return _string(head, at)[1]
    if kind != _ARRAY:
        return at + _SIZES[kind]
    count: int
    kind, count = struct.unpack_from("<IQ", head, at)
    at += 12
    if kind in _SIZES:
        return at + _SIZES[kind] * count
    for _ in range(count):
        at = _after(head, kind, at)
    return at
