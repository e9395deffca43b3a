"""The tokeniser of a model in Hugging Face's layout: the library `tokenizers` with the model's own `tokenizer.json`.

The content that a worker sends is one line of JSON with the additions of the model's other files, followed by
`tokenizer.json` unchanged. Python parses no large document, which would block all streams of a frontend. This module
has no tokenisation rules. It only knows how a vocabulary spells bytes, because the library decodes whole answers only,
and to text.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from services.core.errors import Failure, Reason, invalid
from services.models.tokenizers.byte_level import byte_of_character
from services.models.tokenizers.hf_library import Library, PlainTwin, added_tokens_of, call_library, encode_with
from services.models.tokenizers.inside import huggingface_inside
from services.models.tokenizers.spellings import is_blank

TOKENS_MAX = 1 << 20
"""The largest accepted number of ids in a vocabulary: four times that of the largest known ones."""
GROWTH_MAX = 64
"""The largest accepted number of characters that a normaliser may produce from one."""
_COMPOSED_MAX = 4
"""How many characters normalisation may compose to one. Source: Unicode's FAQ on normalisation, NFD in UTF-32."""
_JOINING = ("Fuse", "Strip")
"""Decoder steps that do not affect a single token. Tokens are joined here anyway, and the space that `Strip` removes
at the start of a text does not occur at the start of an answer, which is in the middle of a text."""

_KEEPING = ("NFC", "NFD", "Prepend", "Strip")
"""Normalisers that cannot write the spelling of a token where the text has none."""

Json = Mapping[str, Any]
Spell = Callable[[str], str | bytes]


class HuggingFaceTokenizer:
    """A vocabulary in the format of `hf_checkpoint.pack`. Raises Failure if it cannot be read or decoded.

    `tokenizer.json` says which special tokens to add to a text. In a SentencePiece vocabulary, `token_bytes` of a word
    begin with its space, also for the first word of a text.
    """

    token_bytes: Sequence[bytes]
    special_tokens: Mapping[int, str]
    token_characters_max: int
    added_tokens: Mapping[str, int]
    rewrites_text: bool
    inside_characters_max: int

    def __init__(self, content: bytes) -> None:
        head, _, tokenizer_json = content.partition(b"\n")
        try:
            self._library = _load(tokenizer_json)
            names = _names(self._library, int(json.loads(head)["vocab_size"]))
            control = {*json.loads(head)["special_tokens"], *_special(self._library)}
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise Failure(Reason.INTERNAL, f"the model's tokeniser cannot be read: {error}") from error
        spell = _speller(_part(self._library.decoder))
        self.token_bytes = tuple(b"" if name in control else _as_bytes(spell(name)) for name in names)
        self.special_tokens = {token: name for token, name in enumerate(names) if name in control}
        # Measured in the vocabulary's spelling: control tokens have no bytes, but are recognised in a text.
        self.token_characters_max = max(map(len, names), default=1) * (_COMPOSED_MAX if self._library.normalizer else 1)
        self.added_tokens = added_tokens_of(self._library)
        self.rewrites_text = _rewrites(_part(self._library.normalizer))
        self._plain = PlainTwin(self._library)
        self.inside_characters_max = huggingface_inside(
            _part(self._library.normalizer), _part(self._library.pre_tokenizer), type(self._library.model).__name__
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """The ids of `text`. See `Tokenizer`. Raises INVALID_ARGUMENT if the library fails on the text."""
        try:
            if parse_special:
                return encode_with(self._library, text, add_special=add_special)
            return self._plain.encode(text, add_special=add_special)
        except ValueError as error:
            raise _refusal(error) from error

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """See `Tokenizer`. Raises INVALID_ARGUMENT if the library fails on the text."""
        try:
            return self._plain.encode_pieces(pieces)
        except ValueError as error:
            raise _refusal(error) from error


def _refusal(error: ValueError) -> Failure:
    return invalid("prompt", f"the model's tokeniser does not accept the text: {error}")


def _load(tokenizer_json: bytes) -> Library:
    """Load the library's tokeniser. Raises ValueError. It never truncates: a long prompt is refused elsewhere."""
    library: Library = call_library(Library.from_buffer, tokenizer_json)
    library.no_truncation()
    library.no_padding()
    if (growth := _growth(_part(library.normalizer))) > GROWTH_MAX:
        raise ValueError(f"its normaliser makes {growth} characters of one, and at most {GROWTH_MAX} are accepted")
    return library


def _part(part: Any) -> Json:
    """A part of a tokeniser, in the format of `tokenizer.json`; {} for None."""
    found: Json = {} if part is None else json.loads(part.__getstate__())
    return found


def _rewrites(normalizer: Json) -> bool:
    """Whether the normaliser may write a character that is not in the text, other than blanks."""
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            return any(map(_rewrites, steps))
        case {"type": "Replace", "content": content}:
            return not is_blank(content)
        case {"type": kind}:
            return kind not in _KEEPING
    return False


def _growth(normalizer: Json) -> int:
    """The largest number of characters that the normaliser's replacements may produce from one."""
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            return prod(_growth(step) for step in steps)
        case {"type": "Replace", "content": content, "pattern": {"String": pattern}} if pattern:
            return max(1, -(-len(content) // len(pattern)))
        case {"type": "Replace", "content": content}:
            return 1 + len(content)  # A regular expression may match between any two characters.
    return 1


def _names(library: Library, vocab_size: int) -> list[str]:
    """The spelling of each id in the vocabulary; "" for unused ids. Raises ValueError for too many ids."""
    ids = library.get_vocab(with_added_tokens=True)
    count = max(vocab_size, max(ids.values(), default=-1) + 1)
    if count > TOKENS_MAX:
        raise ValueError(f"it has {count} token ids, and at most {TOKENS_MAX} are accepted")
    names = [""] * count
    for name, token in ids.items():
        names[token] = name
    return names


def _special(library: Library) -> Iterator[str]:
    return (token.content for token in library.get_added_tokens_decoder().values() if token.special)


def _speller(decoder: Json) -> Spell:
    """The function that decodes a single token. Raises Failure if the decoder is of an unknown kind."""
    steps = [_step(one) for one in _flat(decoder)]
    if not steps:
        raise _unknown("none")

    def spell(name: str) -> str | bytes:
        spelled: str | bytes = name
        for step in steps:
            if isinstance(spelled, str):
                spelled = step(spelled)
        return spelled

    return spell


def _flat(decoder: Json) -> Iterator[Json]:
    """The steps of a decoder, with nested sequences flattened."""
    if decoder.get("type") == "Sequence":
        for one in decoder["decoders"]:
            yield from _flat(one)
    elif decoder:
        yield decoder


def _step(decoder: Json) -> Spell:
    match decoder:
        case {"type": "ByteLevel"}:
            return _from_byte_level
        case {"type": "ByteFallback"}:
            return _from_byte_fallback
        case {"type": "Metaspace", "replacement": mark}:
            return lambda name: name.replace(mark, " ")
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return lambda name: name.replace(pattern, content)
        case {"type": kind} if kind in _JOINING:
            return lambda name: name
    raise _unknown(decoder["type"])


def _unknown(kind: str) -> Failure:
    return Failure(
        Reason.INTERNAL,
        f"the model's tokeniser decodes by {kind!r}; serve a model whose tokeniser is byte-level or SentencePiece's",
    )


_BYTE_OF_CHARACTER = byte_of_character()


def _from_byte_level(name: str) -> bytes:
    """Decode as the library does: a name with a character that stands for no byte is plain text."""
    spelled = [_BYTE_OF_CHARACTER.get(character) for character in name]
    return name.encode() if None in spelled else b"".join(byte for byte in spelled if byte is not None)


def _from_byte_fallback(name: str) -> str | bytes:
    """The byte of a name such as "<0xAB>"; any other name is returned unchanged."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes((int(name[3:5], 16),))
        except ValueError:
            return name
    return name


def _as_bytes(spelled: str | bytes) -> bytes:
    return spelled.encode() if isinstance(spelled, str) else spelled
