"""Reads the small files of a model folder in Hugging Face's layout, for engines that serve such models."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.model_card import TokenizerRef

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_CONTEXT_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_positions")
"""The names of the context length in different model families. Source: their configuration classes in transformers."""
_TEXT_PART = "text_config"
"""The part of a multimodal model's configuration that applies to text."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The properties of a model that a worker needs.

    `end_ids`: tokens that end an answer, the tokeniser's own first; may be empty. `vocab_size`: of the model, which may
    have more ids than the tokeniser. `context_length`: None if the model does not say. `tokenizer_content`: the content
    whose checksum is in `tokenizer`.
    """

    path: Path
    tokenizer: TokenizerRef
    tokenizer_content: bytes
    vocab_size: int
    context_length: int | None
    end_ids: tuple[int, ...]
    chat_template: str
    bos_token: str
    eos_token: str


def read_model_folder(path: Path) -> ModelFolder:
    """Read the folder. Raises ValueError with what is missing or wrong."""
    tokenizer_json = _read_bytes(path / "tokenizer.json")
    tokenizer = _parsed(path / "tokenizer.json", tokenizer_json)
    settings = _read(path / "special_tokens_map.json") | _read(path / "tokenizer_config.json")
    config = _read(path / "config.json")
    try:
        ids = dict(_ids(tokenizer))
        vocab_size = int(_of_text(config, "vocab_size") or max(ids.values()) + 1)
        content = pack(tokenizer_json, special_tokens=_special_names(settings), vocab_size=vocab_size)
        return ModelFolder(
            path=path,
            tokenizer=TokenizerRef("huggingface", hashlib.sha256(content).hexdigest()),
            tokenizer_content=content,
            vocab_size=vocab_size,
            context_length=_context_length(config),
            end_ids=_end_ids(ids, settings, _read(path / "generation_config.json"), config),
            chat_template=_chat_template(path, settings),
            bos_token=_name(settings.get("bos_token")),
            eos_token=_name(settings.get("eos_token")),
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path} is not a model folder in Hugging Face's layout: {error!r}") from error


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        detail = "give the folder of a model with a tokenizer.json, as save_pretrained of its tokeniser writes it"
        raise ValueError(f"{file} does not exist: {detail}") from error
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in the file; {} if the file does not exist."""
    return _parsed(file, _read_bytes(file)) if file.is_file() else {}


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} is not a JSON object")
    return parsed


def pack(tokenizer_json: bytes, *, special_tokens: Iterable[str], vocab_size: int) -> bytes:
    """The content that frontends need to decode tokens, in the format of TokenizerRef in worker.proto.

    `special_tokens`: names of tokens without text, besides those in `tokenizer.json`. `vocab_size`: of the model.
    """
    head = {"special_tokens": sorted(set(special_tokens)), "vocab_size": vocab_size}
    return json.dumps(head).encode() + b"\n" + tokenizer_json


def _ids(tokenizer: Json) -> Iterator[tuple[str, int]]:
    """The names and ids of all tokens."""
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:  # Unigram: a list of names with their scores.
        yield from ((name, token) for token, (name, _score) in enumerate(vocab))
    yield from ((added["content"], added["id"]) for added in tokenizer.get("added_tokens") or ())


def _name(token: Any) -> str:
    """The name of a token, which the files write as a string or as an object; "" for None."""
    if isinstance(token, dict):
        token = token["content"]
    return str(token or "")


def _special_names(settings: Json) -> Iterator[str]:
    tokens = [settings.get(key) for key in _SPECIAL]
    for key in _SPECIAL_LISTS:
        more = settings.get(key) or ()
        tokens += more.values() if isinstance(more, dict) else more
    return (name for name in map(_name, tokens) if name)


def _end_ids(ids: Mapping[str, int], settings: Json, generation: Json, config: Json) -> tuple[int, ...]:
    """The end tokens of the tokeniser and of the model: some chat models list the end of a turn in only one of them."""
    given = generation.get("eos_token_id")
    if given is None:
        given = _of_text(config, "eos_token_id")
    named = given if isinstance(given, list) else [given]
    found = [ids.get(_name(settings.get("eos_token"))), *named]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def _of_text(config: Json, key: str) -> Any:
    found = config.get(key)
    return found if found is not None else (config.get(_TEXT_PART) or {}).get(key)


def _context_length(config: Json) -> int | None:
    found = (_of_text(config, key) for key in _CONTEXT_LENGTHS)
    return next((int(one) for one in found if one is not None), None)


def _chat_template(path: Path, settings: Json) -> str:
    """The chat template. A separate file takes precedence, as in transformers; of several, the one named "default"."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read_bytes(file).decode()
    template = _read(path / "chat_template.json").get("chat_template") or settings.get("chat_template") or ""
    if isinstance(template, str):
        return template
    return str(next((one["template"] for one in template if one["name"] == "default"), ""))
