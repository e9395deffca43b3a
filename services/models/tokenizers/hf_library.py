"""The library `tokenizers`: its errors, and a twin of a tokeniser that recognises no added tokens in a text."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar

from services.core.errors import Failure, Reason
from services.models.tokenizers.spellings import Spellings, is_blank

# Only one text is encoded at a time; by default the library would start a thread for each core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
try:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library
except ImportError as error:
    raise Failure(
        Reason.INTERNAL, "this model's tokeniser needs the library tokenizers: pip install 'unbroken[huggingface]'"
    ) from error

__all__ = ["Library", "PlainTwin", "added_tokens_of", "call_library", "encode_with"]

T = TypeVar("T")


def call_library(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of the library. Raises ValueError for every error.

    The library's errors have no class of their own, and a panic in Rust does not derive from Exception.
    """
    try:
        return function(*args, **options)
    except Exception as error:
        raise ValueError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"it crashes the library tokenizers: {error}") from None


def encode_with(library: Library, text: str, *, add_special: bool) -> list[int]:
    """The ids of a text. Raises ValueError if the library fails on it."""
    whole = text.encode("utf-8", errors="replace").decode()  # A lone surrogate has no UTF-8 encoding.
    # As a batch of one: the library's function for a single text holds the GIL.
    [encoding] = call_library(library.encode_batch_fast, [whole], add_special_tokens=add_special)
    ids: list[int] = encoding.ids
    return ids


def added_tokens_of(library: Library) -> Mapping[str, int]:
    """The ids of the added tokens by spelling, but for those of blanks alone."""
    added = library.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if not is_blank(token.content)}


class PlainTwin:
    """The same tokeniser, which recognises no added tokens in a text. Both share the vocabulary and its memory.

    Added tokens of blanks alone are kept: they spell runs of spaces and line ends. In place of the others there are
    marks, which no text contains: one for each way in which an added token strips the blanks around it, and one that
    cuts a text and leaves no token.
    """

    def __init__(self, library: Library) -> None:
        self._added = library.get_added_tokens_decoder()
        self._added_ids = frozenset(added_tokens_of(library).values())
        self._spellings = Spellings(added_tokens_of(library))
        self._twin = Library(library.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (found := getattr(library, part)) is not None:
                setattr(self._twin, part, found)
        blank = [number for number in sorted(self._added) if is_blank(self._added[number].content)]
        self._twin.add_tokens([self._added[number] for number in blank])
        self._id_of = {self._twin.token_to_id(self._added[number].content): number for number in blank}
        self._name = f"\ufdd0{secrets.token_hex(8)}"
        self._cut = self._name + "cut"
        marks = [AddedToken(self._cut, normalized=False)]
        for left, right in product((False, True), repeat=2):
            marks.append(AddedToken(self._mark(left, right), normalized=False, lstrip=left, rstrip=right))
        self._twin.add_tokens(marks)
        self._mark_ids = frozenset(self._twin.token_to_id(mark.content) for mark in marks)
        self._cut_id = self._twin.token_to_id(self._cut)
        self._own_ids = self._mark_ids | self._id_of.keys()

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of the text. Raises ValueError if the library fails on it."""
        return [self._id_of.get(token, token) for token in encode_with(self._twin, text, add_special=add_special)]

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """See `Tokenizer`. Raises ValueError if the library fails on the text.

        All pieces are one text for the library, because it treats the first word of a text differently.
        """
        ids = self._encode_marked(pieces, lambda text: text)
        if not self._added_ids.isdisjoint(set(ids) - self._own_ids):  # The vocabulary itself has such a spelling.
            ids = self._encode_marked(pieces, lambda text: self._cut.join(self._spellings.broken(text)))
        given = iter([piece for piece in pieces if isinstance(piece, int)])
        return [
            next(given) if token in self._mark_ids else self._id_of.get(token, token)
            for token in ids
            if token != self._cut_id
        ]

    def _encode_marked(self, pieces: Sequence[str | int], write: Callable[[str], str]) -> list[int]:
        texts = (write(piece) if isinstance(piece, str) else self._mark_for(piece) for piece in pieces)
        return encode_with(self._twin, "".join(texts), add_special=False)

    def _mark_for(self, token: int) -> str:
        return self._mark(self._added[token].lstrip, self._added[token].rstrip)

    def _mark(self, left: bool, right: bool) -> str:
        return f"{self._name}{left:d}{right:d}"
