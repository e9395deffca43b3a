"""The jobs of the helper that guides one answer, and its answers to them: see `guide_work.py`.

The first job has a guided field, and the tokens that the answer has already. Each further job is the token that was
drawn. The answer to each says what may follow: see `Step`.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from services.core.request import Guided, GuidedKind

_TOKEN = struct.Struct("!I")


class Step(NamedTuple):
    """What may follow in an answer. `mask`: see `Grammar.token_mask`. `is_complete`: the answer may end here."""

    mask: bytes
    is_complete: bool


def encode_vocabulary(token_bytes: Sequence[bytes], end_ids: Iterable[int]) -> bytes:
    """What the helpers' process loads. `token_bytes`: by token id; b"" for tokens without text."""
    return msgspec.msgpack.encode((token_bytes, sorted(end_ids)))


def decode_vocabulary(content: bytes) -> tuple[list[bytes], list[int]]:
    """The tokens and the end tokens."""
    return msgspec.msgpack.decode(content, type=tuple[list[bytes], list[int]])


def encode_compilation(guided: Guided, generated: Sequence[int]) -> bytes:
    """The first job."""
    return json.dumps((guided.kind, guided.texts, generated)).encode()


def decode_compilation(job: bytes) -> tuple[Guided, list[int]]:
    """The guided field, and the tokens of the answer so far."""
    kind, texts, generated = json.loads(job)
    return Guided(GuidedKind(kind), tuple(texts)), generated


def encode_token(token: int) -> bytes:
    """Each further job."""
    return _TOKEN.pack(token)


def decode_token(job: bytes) -> int:
    [token] = _TOKEN.unpack(job)
    return int(token)


def encode_step(step: Step) -> bytes:
    """The answer to each job."""
    return bytes([step.is_complete]) + step.mask


def decode_step(answer: bytes) -> Step:
    return Step(answer[1:], bool(answer[0]))
