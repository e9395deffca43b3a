"""The tokeniser of a GGUF model: llama.cpp's own, loaded from the metadata of the file.

The worker sends the head of the file, up to the weights: less than 2 MB for a vocabulary of 50,000. The frontend writes
it to a sparse file in memory, of the original length, and llama.cpp loads that without the weights. This module has no
tokenisation rules; it only knows how a vocabulary spells bytes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.core.errors import Failure, Reason
from services.models.tokenizers.byte_level import byte_of_character
from services.models.tokenizers.inside import gguf_inside
from services.models.tokenizers.spellings import Spellings, is_blank
from services.runtime.folders.scratch_file import scratch_file

try:
    from services.models.llama_cpp import llama_cpp, why
except ImportError as error:
    raise Failure(
        Reason.INTERNAL, "this model's tokeniser needs llama.cpp: pip install 'unbroken[llamacpp]'"
    ) from error

_SPM = "llama"
_BPE = "gpt2"

_UNKNOWN, _UNUSED, _CONTROL, _USER_DEFINED, _BYTE, _STRIPS_LEFT, _STRIPS_RIGHT = 1, 2, 8, 16, 32, 128, 256
"""Bits of `llama_token_attr` in llama.h."""


class GgufTokenizer:
    """A vocabulary in the format of `tokenizer_content`. Raises Failure if it cannot be read or is of an unknown kind.

    In a SentencePiece vocabulary, `token_bytes` of a word begin with its space, also for the first word of a text.
    """

    token_bytes: Sequence[bytes]
    special_tokens: Mapping[int, str]
    token_characters_max: int
    added_tokens: Mapping[str, int]
    rewrites_text = False
    inside_characters_max: int

    def __init__(self, content: bytes) -> None:
        self._model = _load_vocabulary(content)
        self._vocab = self._model.get_vocab()
        self.token_bytes = vocabulary_bytes(self._model)
        hidden = (token for token, content in enumerate(self.token_bytes) if not content)
        self.special_tokens = {token: name for token in hidden if (name := self._vocab.get_text(token))}
        self.added_tokens = dict(_added_tokens(self._vocab))
        self._spellings = Spellings(self.added_tokens)
        self._added_ids = frozenset(self.added_tokens.values())
        self._line_end = self.encode("\n", add_special=False)
        # Measured in the vocabulary's spelling: control tokens have no bytes, but are recognised in a text.
        self.token_characters_max = max(len(self._vocab.get_text(token)) for token in range(self._vocab.n_vocab))
        self.inside_characters_max = gguf_inside(_kind_of(self._model), _splitter_of(self._model))

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """The ids of `text`. See `Tokenizer`."""
        whole = text.encode("utf-8", errors="replace").decode()  # A lone surrogate has no UTF-8 encoding.
        ids: list[int] = self._vocab.tokenize(whole, add_special=add_special, parse_special=parse_special)
        return ids

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """See `Tokenizer`. As in llama.cpp, a text between added tokens is encoded alone, and they may strip it."""
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            text = piece
            if index and self._has(pieces[index - 1], _STRIPS_RIGHT):
                text = text.lstrip()
            if index + 1 < len(pieces) and self._has(pieces[index + 1], _STRIPS_LEFT):
                text = text.rstrip()
            ids += self._encode_plain(text)
        return ids

    def _has(self, piece: str | int, attribute: int) -> bool:
        return isinstance(piece, int) and bool(self._vocab.get_attr(piece) & attribute)

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of a text without added tokens. llama.cpp recognises user-defined ones in any text."""
        ids = self.encode(text, add_special=False, parse_special=False)
        if self._added_ids.isdisjoint(ids):
            return ids
        first, *others = self._spellings.broken(text)
        ids = self.encode(first, add_special=False, parse_special=False)
        for other in others:
            ids += self._encode_further(other)
        return ids

    def _encode_further(self, text: str) -> list[int]:
        """The ids of a text within a longer one: without the space that SentencePiece puts before a text."""
        before = self._line_end
        ids = self.encode("\n" + text, add_special=False, parse_special=False)
        is_apart = ids[: len(before)] == before
        return ids[len(before) :] if is_apart else self.encode(text, add_special=False, parse_special=False)


def _added_tokens(vocab: Any) -> Iterator[tuple[str, int]]:
    """The tokens that llama.cpp recognises in a text, but for those of blanks alone."""
    for token in range(vocab.n_vocab):
        if vocab.get_attr(token) & (_UNKNOWN | _CONTROL | _USER_DEFINED) and not is_blank(
            name := vocab.get_text(token)
        ):
            yield name, token


def vocabulary_bytes(model: Any) -> tuple[bytes, ...]:
    """The bytes of each token of a loaded model. Raises Failure if its vocabulary is of an unknown kind."""
    return tuple(_token_bytes(model.get_vocab(), _kind_of(model)))


def tokenizer_content(path: Path) -> bytes:
    """The head of a GGUF file: its metadata and the list of its tensors. Raises ValueError for another file."""
    size: int = _open(path).data_offset
    with path.open("rb") as file:
        return file.read(size)


def _load_vocabulary(content: bytes) -> Any:
    try:
        with scratch_file(content) as path:
            os.truncate(path, _whole_size(path))
            return llama_cpp.LlamaModel(str(path), _without_weights())
    except (ValueError, RuntimeError, OSError) as error:
        raise Failure(Reason.INTERNAL, f"llama.cpp cannot read the model's tokeniser: {why(error)}") from error


def _without_weights() -> Any:
    # Not `vocab_only`: the wrapper queries the heads of every model, and llama.cpp aborts the process if the model was
    # loaded that way.
    parameters = llama_cpp.LlamaModelParams()
    parameters.no_alloc = True
    parameters.use_mmap = False
    return parameters


def _whole_size(head: Path) -> int:
    """The length in bytes of the file that this head comes from. llama.cpp refuses tensors outside of the file."""
    gguf = _open(head)
    return int(gguf.data_offset) + max(
        int(tensor["offset"]) + int(tensor["size"]) for tensor in gguf.get_all_tensor_info()
    )


def _open(path: Path) -> Any:
    try:
        return llama_cpp.GGUFContext.from_file(str(path))
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{path} is not a GGUF file that llama.cpp can read: {why(error)}") from error


def _kind_of(model: Any) -> str:
    kind = str(model.meta_val_str("tokenizer.ggml.model"))
    if kind not in (_SPM, _BPE):
        raise Failure(
            Reason.INTERNAL,
            f"the model's tokeniser is of kind {kind!r}; serve a model whose tokeniser is {_SPM!r} or {_BPE!r}",
        )
    return kind


def _splitter_of(model: Any) -> str:
    """`tokenizer.ggml.pre`. llama.cpp takes a missing one for "default"."""
    try:
        return str(model.meta_val_str("tokenizer.ggml.pre"))
    except ValueError:
        return "default"


def _token_bytes(vocab: Any, kind: str) -> Iterator[bytes]:
    """The bytes of each token. llama.cpp's wrapper returns text instead, and a token may be part of a character."""
    byte_of = byte_of_character()
    for token in range(vocab.n_vocab):
        text: str = vocab.get_text(token)
        attributes: int = vocab.get_attr(token)
        if attributes & (_UNKNOWN | _UNUSED | _CONTROL):
            yield b""
        elif attributes & _USER_DEFINED:
            yield text.encode()
        elif attributes & _BYTE:
            yield bytes((int(text[3:5], 16),))  # "<0xAB>"
        elif kind == _SPM:
            yield text.replace("▁", " ").encode()
        else:
            yield b"".join(byte_of.get(character) or character.encode() for character in text)
