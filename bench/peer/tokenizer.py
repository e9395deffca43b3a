"""Writes the tokeniser of a GGUF model as the folder of JSON files that the peer loads. Runs in the peer's environment.

    python bench/peer/tokenizer.py smollm2.gguf FOLDER

The peer's mocker computes nothing, but its frontend tokenises and decodes, so it gets a real vocabulary.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CONTROL = 3
"""The type of a token that stands for no text. Source: `llama_token_type` in llama.h."""
_CONTEXT_TOKENS = 8192


def main(gguf_file: str, folder: str) -> None:
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type"))
    special = [token for token, kind in enumerate(kinds) if kind == _CONTROL]
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "tokenizer.json": tokenizer(tokens, merges, special),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _CONTEXT_TOKENS,
            "bos_token": tokens[1],
            "eos_token": tokens[2],
            "chat_template": fields["tokenizer.chat_template"].contents(),
        },
        "config.json": config(len(tokens)),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }.items():
        (out / name).write_text(json.dumps(content), encoding="utf-8")


def tokenizer(tokens: Sequence[str], merges: Sequence[str], special: Sequence[int]) -> dict[str, Any]:
    """Return a byte-level BPE in the format of the `tokenizers` library. `special`: ids that stand for no text."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": token, "content": tokens[token], **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def config(vocabulary: int) -> dict[str, Any]:
    """Return the shape of SmolLM2-135M. The peer requires it, and its mocker hardly uses it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": vocabulary,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
