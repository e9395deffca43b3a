"""Tokenisers: text to token ids, token ids to bytes. The frontend gets them from workers, by checksum."""

from collections.abc import Sequence
from typing import Protocol

from services.core.errors import Failure, Reason
from services.core.model_card import TokenizerRef
from services.models.tokenizers.byte_level import ByteTokenizer


class Tokenizer(Protocol):
    """One model's vocabulary.

    token_bytes: for each id the bytes of its text; empty for control tokens. A token may be part of a character.
    token_characters_max: no token stands for more characters of a text, so a text of C has at least C / max tokens.
    """

    @property
    def token_bytes(self) -> Sequence[bytes]: ...

    @property
    def token_characters_max(self) -> int: ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The ids of `text`. Special tokens in it are read as such; add_special: begin and end as the model expects."""
        ...


def load_tokenizer(ref: TokenizerRef, content: bytes) -> Tokenizer:
    """The tokeniser that `ref` names, from its content. Raises Failure for a kind that this process can't read."""
    match ref.kind:
        case "bytes":
            return ByteTokenizer()
        case "gguf":
            from services.models.tokenizers.gguf import GgufTokenizer  # needs the extra `llamacpp`

            return GgufTokenizer(content)
        case "huggingface":
            from services.models.tokenizers.huggingface import HuggingFaceTokenizer  # needs the extra `huggingface`
            from services.models.tokenizers.sandbox import try_reading

            try_reading(content)
            return HuggingFaceTokenizer(content)
    raise Failure(Reason.INTERNAL, f"the worker's tokeniser is of kind {ref.kind!r}, which this version cannot read")
