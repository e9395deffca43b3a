"""xgrammar as TensorRT-LLM brings it, played by llguidance: it compiles a text, refuses it, or crashes the process."""

import importlib
import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

CRASH = "crash the compiler"
"""A text with these words ends the process that compiles it: see also tensorrt_llm/_fake/guided.py."""


class VocabType(Enum):
    RAW = 0


class TokenizerInfo:
    def __init__(
        self, encoded_vocab: Sequence[bytes], vocab_type: VocabType, *, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        assert all(isinstance(token, bytes) for token in encoded_vocab)
        assert len(encoded_vocab) <= vocab_size


class GrammarCompiler:
    def __init__(self, tokenizer_info: TokenizerInfo, *, max_threads: int, cache_enabled: bool) -> None:
        self._llguidance: Any = importlib.import_module("llguidance")

    def compile_json_schema(self, schema: str) -> object:
        return self._check(self._llguidance.LLMatcher.grammar_from_json_schema, schema)

    def compile_regex(self, regex: str) -> object:
        return self._check(self._llguidance.LLMatcher.grammar_from_regex, regex)

    def compile_grammar(self, grammar: str) -> object:
        convert = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark
        return self._check(lambda text: self._llguidance.LLMatcher.grammar_from_lark(convert(text)), grammar)

    def compile_builtin_json_grammar(self) -> object:
        return self.compile_json_schema('{"type": "object"}')

    def _check(self, make: Any, text: str) -> object:
        if CRASH in text:
            os.abort()
        if error := self._llguidance.LLMatcher.validate_grammar(make(text)):
            raise RuntimeError(error)
        return text
