"""Tokenisers: text to token ids, and token ids to bytes. Frontends fetch them from workers, by checksum."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.core.errors import Failure, Reason
from services.core.model_card import TokenizerRef
from services.models.tokenizers.byte_level import ByteTokenizer


class Vocabulary(Protocol):
    """The tokens of one model.

    `token_bytes`: the bytes of each token's text, by id; empty for control tokens. A token may be part of a character.
    `special_tokens`: the spelling of each token that has no bytes, by id, as templates write it; unused ids are absent.
    """

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def special_tokens(self) -> Mapping[int, str]: ...


class Tokenizer(Vocabulary, Protocol):
    """The vocabulary of one model, and how a text becomes tokens.

    `token_characters_max`: the largest number of characters in a token: a text of C characters has at least C / max
    tokens. `added_tokens`: the ids of tokens that are recognised wherever a text spells them, by spelling: control
    tokens, and others that the model's author added. Those of blanks alone are left out. `rewrites_text`: a text may
    spell a token only after normalisation, as in other case. `inside_characters_max`: the longest text that is known to
    be safe in a process that must not crash (see `inside.py`).
    """

    def __hash__(self) -> int: ...

    @property
    def token_characters_max(self) -> int: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    @property
    def rewrites_text(self) -> bool: ...

    @property
    def inside_characters_max(self) -> int: ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """The ids of `text`. `add_special`: add the special tokens that the model expects.

        `parse_special`: recognise control tokens that the text spells. Without it they are text like any other.
        """
        ...

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """The ids of a text in pieces: added tokens by id, and strings in which no added token is recognised."""
        ...


def load_tokenizer(ref: TokenizerRef, content: bytes) -> Tokenizer:
    """Load the tokeniser of `ref` from its content. Raises Failure if this process cannot read its kind.

    A damaged one may crash the process, so `prompt_encoder.py` loads it in another one first.
    """
    match ref.kind:
        case "bytes":
            return ByteTokenizer()
        case "gguf":
            from services.models.tokenizers.gguf import GgufTokenizer  # Needs the extra `llamacpp`.

            return GgufTokenizer(content)
        case "huggingface":
            from services.models.tokenizers.huggingface import HuggingFaceTokenizer  # Needs the extra `huggingface`.

            return HuggingFaceTokenizer(content)
    raise Failure(Reason.INTERNAL, f"the worker's tokeniser is of kind {ref.kind!r}, which this version cannot read")
