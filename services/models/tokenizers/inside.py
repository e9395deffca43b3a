"""What is known to be safe to tokenise in the process that holds everybody's streams, by kind of tokeniser.

Anything else goes to a helper process: longer texts, because they would delay other streams, and kinds that are not in
these tables, because nobody has measured them. `tests/models/tokenizers/test_inside.py` runs each kind with hostile
texts on a small stack.

| kind | why | characters |
| --- | --- | --- |
| bytes | Python's own encoder | CHARACTERS_INSIDE_MAX |
| GGUF, SentencePiece | loops over the text, with a queue of merges | NATIVE_INSIDE_MAX |
| GGUF, in SPLIT_BY_LOOPS | llama.cpp splits by loops, or by an expression for one character | NATIVE_INSIDE_MAX |
| GGUF, in SPLIT_BY_RECURSION | std::regex recurses for each character of a word | `recursive_max` |
| Hugging Face, parts in tables below | Rust with loops; expressions backtrack on the heap | NATIVE_INSIDE_MAX |
"""

import resource
from collections.abc import Iterator, Mapping
from typing import Any

CHARACTERS_INSIDE_MAX = 32_768
NATIVE_INSIDE_MAX = 8_192
"""Ordinary text of that length takes some milliseconds. The worst, nothing but special tokens, takes 30 ms; four times
as much of it takes 200 ms."""
RECURSIVE_INSIDE_MAX = 1_024
STACK_BYTES_PER_CHARACTER = 1_024
"""Three times what was measured: 350 to 390."""
STACK_SHARE = 8
"""The part of the stack that a text may need, as a divisor: of the usual 8 MiB, RECURSIVE_INSIDE_MAX use an eighth."""

SPLIT_BY_LOOPS = frozenset(
    (
        # Llama 3's expression.
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        # GPT-2's expression.
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "gigachat"),
        *("a.x-4.0", "mellum", "modern-bert", "roberta-bpe"),
        # Single digits first, then GPT-2's expression.
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        # Qwen's expressions.
        *("qwen2", "qwen35", "stablelm2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"),
    )
)
SPLIT_BY_RECURSION = frozenset(
    (
        *("default", "deepseek-llm", "deepseek-coder", "deepseek-v3", "youtu", "falcon", "jais-2", "poro-chat"),
        *("viking", "bloom", "gpt3-finnish", "tekken", "gpt-4o", "llama4", "kanana2", "tiny_aya", "superbpe"),
        *("bailingmoe", "bailingmoe2", "llada-moe", "seed-coder", "hunyuan-dense", "joyai-llm", "afmoe", "minimax-m2"),
        # These resisted the texts of the tests, but have expressions of their own.
        *("exaone-moe", "exaone4", "chameleon", "sarvam-moe", "gemma4", "trillion", "granite-docling", "hunyuan"),
        *("kimi-k2", "grok-2", "solar-open"),
    )
)
"""Values of `tokenizer.ggml.pre`."""

Json = Mapping[str, Any]


def gguf_inside(model: str, pre: str) -> int:
    """The longest text, in characters, for a GGUF vocabulary. Parameters: `tokenizer.ggml.model` and `.pre`."""
    if model == "llama" or pre in SPLIT_BY_LOOPS:
        return NATIVE_INSIDE_MAX
    if pre in SPLIT_BY_RECURSION:
        stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
        return recursive_max(stack_bytes)
    return 0


def recursive_max(stack_bytes: int) -> int:
    """The longest text, in characters, that recursion may read on a stack of that size; -1: without a limit."""
    if stack_bytes < 0:
        return RECURSIVE_INSIDE_MAX
    return min(RECURSIVE_INSIDE_MAX, stack_bytes // STACK_SHARE // STACK_BYTES_PER_CHARACTER)


def huggingface_inside(normalizer: Json, pre_tokenizer: Json, model: str) -> int:
    """The longest text, in characters, for a Hugging Face tokeniser. Parameters: parts of `tokenizer.json`."""
    is_known = (
        model in _MODELS
        and all(_is_known_normalizer(step) for step in _flat(normalizer, "normalizers"))
        and all(_is_known_pre_tokenizer(step) for step in _flat(pre_tokenizer, "pretokenizers"))
    )
    return NATIVE_INSIDE_MAX if is_known else 0


_MODELS = frozenset({"BPE", "Unigram", "WordLevel"})
_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "ByteLevel", "BertNormalizer"}
)
_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "Digits", "Metaspace", "Punctuation", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _CAPITALS + "*" + _SMALL + "+", r"[^\r\n\p{L}\p{N}]?" + _CAPITALS + "+" + _SMALL + "*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS, _SIGNS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_EXPRESSIONS = frozenset(
    "|".join(parts)
    for parts in (
        (_SHORT, _WORD, r"\p{N}{1,3}", _SIGNS, _BLANKS),  # Llama 3
        (_SHORT, _WORD, r"\p{N}", _SIGNS, _BLANKS),  # Qwen 2 and 3
        (*(word + _SHORT + "?" for word in _CASED), r"\p{N}{1,3}", _SIGNS_WITH_SLASH, _BLANKS),  # GPT-4o, Llama 4
        (*_CASED, r"\p{N}", _SIGNS_WITH_SLASH, _BLANKS),  # Mistral's Tekken
        (r"\p{N}",),
        (r"\p{N}{1,3}",),
    )
)
"""Expressions that split a text. Each takes time in proportion to it. Source: `tokenizer.json` of the models."""


def _is_known_normalizer(step: Json) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": _}}:
            return True
    return step["type"] in _NORMALIZERS


def _is_known_pre_tokenizer(step: Json) -> bool:
    match step:
        case {"type": "Split", "pattern": {"String": _}}:
            return True
        case {"type": "Split", "pattern": {"Regex": expression}}:
            return expression in _EXPRESSIONS
    return step["type"] in _PRE_TOKENIZERS


def _flat(part: Json, name: str) -> Iterator[Json]:
    """The steps of a part, with nested sequences flattened. `name`: of the list in a sequence."""
    if part.get("type") == "Sequence":
        for step in part[name]:
            yield from _flat(step, name)
    elif part:
        yield part
