"""Guided decoding with llguidance, whichever backend is configured."""

import importlib
import json
from collections.abc import Sequence
from typing import Any

from ..sampling_params import GuidedDecodingParams
from .vocabulary import Vocabulary


class _Tokens:
    """The attributes that llguidance needs from a tokeniser."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.token_bytes
        self.eos_token_id = vocabulary.eos_token_id
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


CRASH = "crash the compiler"
"""A text with these words ends the process that compiles it, and so the engine."""


class CompilerCrashError(Exception):
    """The library that compiles grammars has crashed."""


class Guide:
    """The grammar of one answer, and its state after the tokens so far."""

    def __init__(self, matcher: Any, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._has_ended = False

    def allowed(self) -> list[int]:
        """The tokens that may follow. End tokens are included if the grammar is complete; after one, there are none."""
        if self._has_ended or self._matcher.is_error():
            return []
        mask = self._matcher.compute_bitmask()
        return [8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]

    def accept_token(self, token: int) -> None:
        self._has_ended = token in self._end_ids
        self._matcher.consume_token(token)


class GuideBuilder:
    """Builds guides for one vocabulary. Imports llguidance only when a guide is built."""

    def __init__(self, vocabulary: Vocabulary, backend: str) -> None:
        self._vocabulary = vocabulary
        self._backend = backend
        self._tokenizer: Any = None

    def build(self, params: GuidedDecodingParams) -> Guide:
        """Build a guide. Raises ValueError for an invalid grammar, and CompilerCrashError."""
        if any(CRASH in str(text) for text in (params.json, params.regex, params.grammar)):
            raise CompilerCrashError
        llguidance: Any = importlib.import_module("llguidance")
        if self._tokenizer is None:
            count, ends = len(self._vocabulary.token_bytes), list(self._vocabulary.end_ids)
            self._tokenizer = llguidance.LLTokenizer(_Tokens(self._vocabulary), n_vocab=count, eos_token=ends)
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar(params), log_level=0)
        if matcher.is_error():
            raise ValueError(f"invalid guide: {matcher.get_error()}")
        return Guide(matcher, self._vocabulary.end_ids)

    def _grammar(self, params: GuidedDecodingParams) -> str:
        """The grammar in llguidance's language. `params.grammar` is GBNF for xgrammar, and Lark for llguidance."""
        matcher: Any = importlib.import_module("llguidance").LLMatcher
        if params.structural_tag is not None:
            raise ValueError("the fake does not play structural tags")
        if params.grammar is not None:
            convert = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark
            lark = params.grammar if self._backend == "llguidance" else convert(params.grammar)
            return str(matcher.grammar_from_lark(lark))
        if params.regex is not None:
            return str(matcher.grammar_from_regex(params.regex))
        schema = {"type": "object"} if params.json_object else params.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        json.loads(text)
        return str(matcher.grammar_from_json_schema(text))
