"""The vocabulary of the model in a folder.

The following files are read if they exist: config.json (vocab_size, eos_token_id, max_position_embeddings),
generation_config.json (eos_token_id, which takes precedence) and tokenizer.json (the texts of the tokens). Without a
tokenizer.json, each token is a byte and 256 is the end token. The first of several end tokens is the tokeniser's.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES_END_ID = 256
CONTEXT_LENGTH = 2048
"""The default if config.json has no context length."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary. `token_bytes`: the bytes of each token; empty for special ones. `end_ids`: at least one."""

    token_bytes: tuple[bytes, ...]
    end_ids: tuple[int, ...]
    context_length: int

    @property
    def eos_token_id(self) -> int:
        return self.end_ids[0]

    def encode(self, text: str) -> list[int]:
        """Encode by longest match. A real tokeniser gives other ids, but tests need only some ids for a text."""
        by_bytes = {content: token for token, content in enumerate(self.token_bytes) if content}
        longest = max(map(len, by_bytes))
        rest, token_ids = text.encode(), list[int]()
        while rest:
            length = next(length for length in range(longest, 0, -1) if rest[:length] in by_bytes)
            token_ids.append(by_bytes[rest[:length]])
            rest = rest[length:]
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        return b"".join(self.token_bytes[token] for token in token_ids).decode(errors="replace")


def load_vocabulary(model: str) -> Vocabulary:
    folder = Path(model)
    config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
    tokenizer = _read(folder / "tokenizer.json")
    token_bytes = _token_bytes(tokenizer) if tokenizer else [bytes((value,)) for value in range(256)]
    end = generation.get("eos_token_id", config.get("eos_token_id", BYTES_END_ID))
    end_ids = (end,) if isinstance(end, int) else tuple(end)
    size = max(config.get("vocab_size", 0), len(token_bytes), *(token + 1 for token in end_ids))
    token_bytes += [b""] * (size - len(token_bytes))
    return Vocabulary(tuple(token_bytes), end_ids, config.get("max_position_embeddings", CONTEXT_LENGTH))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _token_bytes(tokenizer: dict[str, Any]) -> list[bytes]:
    """The bytes of each token in a vocabulary that writes bytes as GPT-2's does."""
    texts: dict[str, int] = tokenizer["model"]["vocab"]
    specials = {token["id"] for token in tokenizer.get("added_tokens", ()) if token.get("special")}
    count = 1 + max([*texts.values(), *(token["id"] for token in tokenizer.get("added_tokens", ()))])
    of_character, token_bytes = byte_of_character(), [b""] * count
    for text, token in texts.items():
        if token not in specials:
            pieces = (of_character.get(character) or character.encode() for character in text)
            token_bytes[token] = b"".join(pieces)
    for added in tokenizer.get("added_tokens", ()):
        token_bytes[added["id"]] = b"" if added.get("special") else added["content"].encode()
    return token_bytes


def byte_of_character() -> dict[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves; the other bytes use U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printable]
    characters = [chr(value) for value in printable] + [chr(0x100 + index) for index in range(len(others))]
    return {character: bytes((value,)) for character, value in zip(characters, printable + others, strict=True)}
