"""The tokeniser of a model in Hugging Face's layout: the library `tokenizers`, on the model's own `tokenizer.json`.

What travels is a line of JSON with what the model's other files add, and after it `tokenizer.json` as it is: Python
parses nothing large, which would hold up all streams of a frontend. No rule of tokenisation is written down here; only
how a vocabulary spells bytes, which the library tells as text and only for whole answers.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from services.core.errors import Failure, Reason, invalid
from services.models.tokenizers.byte_level import byte_of_character

# One text at a time is encoded here; the library would start a thread for each core all the same.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
try:
    from tokenizers import Tokenizer as Library
except ImportError as error:
    raise Failure(
        Reason.INTERNAL, "this model's tokeniser needs the library tokenizers: pip install 'unbroken[huggingface]'"
    ) from error

TOKENS_MAX = 1 << 20
"""How many ids a vocabulary may have: the largest known are a fourth of it."""
GROWTH_MAX = 64
"""How many characters a normaliser may make of one."""
_COMPOSED_MAX = 4
"""How many characters normalisation may make one of. Source: Unicode's FAQ on normalisation, NFD in UTF-32."""
_JOINING = ("Fuse", "Strip")
"""Steps of a decoder that say nothing of a single token: tokens are joined here anyhow, and the space that `Strip`
takes from the beginning of a text is not there in the middle of one, where an answer begins."""

Json = Mapping[str, Any]
Spell = Callable[[str], str | bytes]
T = TypeVar("T")


class HuggingFaceTokenizer:
    """A vocabulary as `model_folder.pack` wrote it. Raises Failure if it cannot be read or decodes in an unknown way.

    What to add to a text is what `tokenizer.json` says. `token_bytes` of a SentencePiece vocabulary begin words with
    their space: so does the first word of a text.
    """

    token_bytes: Sequence[bytes]
    token_characters_max: int

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
        # As the vocabulary spells them: control tokens, which have no bytes, are read from a text too.
        self.token_characters_max = max(map(len, names), default=1) * (_COMPOSED_MAX if self._library.normalizer else 1)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of `text`. Special tokens in it are read as such; add_special: begin and end as the model expects.

        Raises INVALID_ARGUMENT when the library does not take the text.
        """
        whole = text.encode("utf-8", errors="replace").decode()  # half a surrogate pair has no UTF-8
        try:
            # Of a batch of one, since for a single text the library would hold up all other threads.
            [encoding] = _of_library(self._library.encode_batch_fast, [whole], add_special_tokens=add_special)
        except ValueError as error:
            raise invalid("prompt", f"the model's tokeniser does not take the text: {error}") from error
        ids: list[int] = encoding.ids
        return ids


def _load(tokenizer_json: bytes) -> Library:
    """Raises ValueError. A prompt that is too long is refused elsewhere, never cut."""
    library: Library = _of_library(Library.from_buffer, tokenizer_json)
    library.no_truncation()
    library.no_padding()
    if (growth := _growth(_part(library.normalizer))) > GROWTH_MAX:
        raise ValueError(f"its normaliser makes {growth} characters of one, and more than {GROWTH_MAX} are not taken")
    return library


def _of_library(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """What the library returns. Raises ValueError: its errors have no class of their own, and one that it did not
    foresee (a panic, in Rust) is not even an Exception."""
    try:
        return function(*args, **options)
    except Exception as error:
        raise ValueError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"it breaks the library tokenizers: {error}") from None


def _part(part: Any) -> Json:
    """A part of a tokeniser as in `tokenizer.json`; {}: there is none."""
    found: Json = {} if part is None else json.loads(part.__getstate__())
    return found


def _growth(normalizer: Json) -> int:
    """How many characters it may make of one, where it replaces some by others."""
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            return prod(_growth(step) for step in steps)
        case {"type": "Replace", "content": content, "pattern": {"String": pattern}} if pattern:
            return max(1, -(-len(content) // len(pattern)))
        case {"type": "Replace", "content": content}:
            return 1 + len(content)  # an expression may match between any two characters
    return 1


def _names(library: Library, vocab_size: int) -> list[str]:
    """How each id is spelled in the vocabulary, "" for one that is not. Raises ValueError for too many ids."""
    ids = library.get_vocab(with_added_tokens=True)
    count = max(vocab_size, max(ids.values(), default=-1) + 1)
    if count > TOKENS_MAX:
        raise ValueError(f"it has {count} token ids, and more than {TOKENS_MAX} are not taken")
    names = [""] * count
    for name, token in ids.items():
        names[token] = name
    return names


def _special(library: Library) -> Iterator[str]:
    return (token.content for token in library.get_added_tokens_decoder().values() if token.special)


def _speller(decoder: Json) -> Spell:
    """How a token is decoded, by itself. Raises Failure if the decoder is of an unknown kind."""
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
    """The steps of a decoder, those of sequences within it in their place."""
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
    """As the library does it: what has a character that stands for no byte is text as it is."""
    spelled = [_BYTE_OF_CHARACTER.get(character) for character in name]
    return name.encode() if None in spelled else b"".join(byte for byte in spelled if byte is not None)


def _from_byte_fallback(name: str) -> str | bytes:
    """Of "<0xAB>" the byte, of anything else the text."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return bytes((int(name[3:5], 16),))
        except ValueError:
            return name
    return name


def _as_bytes(spelled: str | bytes) -> bytes:
    return spelled.encode() if isinstance(spelled, str) else spelled
