"""The work of a helper process: tries whether the library of an engine can compile a guided field.

The engine compiles it once more, in a process that all its requests share. So the library must be the same, and the
bounds are tight: what is compiled here within them takes no longer there.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from services.core.errors import Failure, Reason
from services.isolation.helper import Work
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from services.worker.guided.explain import failing
from services.worker.guided.refusals import unusable

Compile = Callable[[Mapping[str, Any]], object]
"""Compiles keyword arguments of TensorRT-LLM's GuidedDecodingParams. Raises an exception of the library."""


def load(content: bytes) -> Work:
    """Load a library and the vocabulary. Raises Failure. `content`: see `encode_library`."""
    head, _, tokenizer = content.partition(b"\n")
    backend, vocab_size, end_ids = json.loads(head)
    tokens = list(HuggingFaceTokenizer(tokenizer).token_bytes)
    try:
        compile_field = _LIBRARIES[backend](tokens, vocab_size, end_ids)
    except ImportError as error:
        raise Failure(Reason.INTERNAL, f"{backend} cannot be imported to try guided requests: {error}") from error

    def work(job: bytes) -> bytes:
        try:
            kind, given = json.loads(job)
            compile_field(given)
        except MemoryError:
            raise
        except BaseException as error:  # A panic in Rust does not derive from Exception.
            raise unusable(kind, failing(error, backend)) from error
        return b""

    return work


def _xgrammar(tokens: list[bytes], vocab_size: int, end_ids: list[int]) -> Compile:
    xgrammar: Any = importlib.import_module("xgrammar")
    vocabulary = xgrammar.TokenizerInfo(
        tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=end_ids
    )
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile_field(given: Mapping[str, Any]) -> object:
        match given:
            case {"json": text}:
                return compiler.compile_json_schema(text)
            case {"regex": text}:
                return compiler.compile_regex(text)
            case {"grammar": text}:
                return compiler.compile_grammar(text)
        return compiler.compile_builtin_json_grammar()

    return compile_field


def _llguidance(tokens: list[bytes], vocab_size: int, end_ids: list[int]) -> Compile:
    llguidance: Any = importlib.import_module("llguidance")

    def compile_field(given: Mapping[str, Any]) -> object:
        match given:
            case {"json": text}:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
            case {"regex": text}:
                grammar = llguidance.LLMatcher.grammar_from_regex(text)
            case _:
                grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "object"})
        if error := llguidance.LLMatcher.validate_grammar(grammar):
            raise ValueError(error)
        return grammar

    return compile_field


_LIBRARIES = {"xgrammar": _xgrammar, "llguidance": _llguidance}
