"""Creates model folders in the layout of Hugging Face, without weights, for engines that take such a folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.models.tokenizers.byte_level import EOS, VOCAB_SIZE, byte_of_character

END = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
CONTEXT_LENGTH = 4096
SMOLLM2_SPECIAL_COUNT = 17

Files = Mapping[str, Any]
"""The content of each file; None: the file does not exist."""


def make_model_folder(folder: Path, changed: Files | None = None, *, context_length: int = CONTEXT_LENGTH) -> Path:
    """Create a model with the mocker's tokens: ids 0 to 255 are bytes, 256 is the end token. Returns the folder.

    `changed`: further files, or other content of these files.
    """
    files: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": context_length,
            "eos_token_id": EOS,
        },
        "generation_config.json": {"eos_token_id": EOS},
        "tokenizer.json": bytes_tokenizer(),
        "tokenizer_config.json": {"eos_token": END, "chat_template": CHAT_TEMPLATE},
    }
    write_folder(folder, files | dict(changed or {}))
    return folder


def write_folder(folder: Path, files: Files) -> None:
    """Write strings as they are, and anything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")


def bytes_tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` of a vocabulary with all bytes, each with its value as id, and the end token."""
    vocab = {character: byte[0] for character, byte in byte_of_character().items()}
    return byte_level_bpe(vocab, merges=[], special={END: EOS})


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Sequence[str], special: Mapping[str, int], **parts: Any
) -> dict[str, Any]:
    """Return a `tokenizer.json` like GPT-2's, Llama 3's and Qwen's. `merges`: "left right". `special`: ids by name."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    given = {"pre_tokenizer": byte_level, "decoder": byte_level} | parts
    return _tokenizer(_bpe(vocab, merges), special, **given)


def byte_fallback_bpe(
    vocab: Mapping[str, int], merges: Sequence[str], special: Mapping[str, int], **parts: Any
) -> dict[str, Any]:
    """Return a `tokenizer.json` like Llama 2's: words begin with "▁", and missing characters are bytes: "<0x41>"."""
    blank, word = {"String": " "}, {"String": "▁"}
    given = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": blank, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": word, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    } | parts
    model = _bpe(vocab, merges) | {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return _tokenizer(model, special, **given)


def _bpe(vocab: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    pairs = [merge.split(" ", 1) for merge in merges]
    return {"type": "BPE", "vocab": dict(vocab), "merges": pairs}


def _tokenizer(model: dict[str, Any], special: Mapping[str, int], **parts: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token, "content": name} | flags for name, token in special.items()]
    return {"version": "1.0", "added_tokens": added, "model": model} | parts


def smollm2_tokenizer() -> dict[str, Any]:
    """Return the `tokenizer.json` of the GGUF model of the tests: the same vocabulary in the other format."""
    from services.models.download import resolve
    from services.models.llama_cpp import llama_cpp

    file = llama_cpp.GGUFContext.from_file(str(resolve("smollm2")))
    tokens, merges = (file.get_value(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return byte_level_bpe(
        {name: token for token, name in enumerate(tokens)},
        merges,
        special={tokens[token]: token for token in range(SMOLLM2_SPECIAL_COUNT)},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, byte_level]},
    )
