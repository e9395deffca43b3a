"""The sandbox: a tokeniser that crashes its process crashes a child process only, and the failure says why."""

import base64
import json
from typing import Any

import pytest

from services.core.errors import Failure
from services.core.model_card import TokenizerRef
from services.models.hf_checkpoint import pack
from services.models.tokenizers import load_tokenizer, sandbox
from services.models.tokenizers.sandbox import try_reading
from tests.support.model_folder import bytes_tokenizer


def content_with(**parts: Any) -> bytes:
    return pack(json.dumps(bytes_tokenizer() | parts).encode(), special_tokens=[], vocab_size=0)


def precompiled(charsmap: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}


def test_valid_tokenizer_passes() -> None:
    try_reading(content_with())


def test_damaged_tokenizer_is_refused_with_the_reason() -> None:
    with pytest.raises(Failure, match="cannot be read: Cannot instantiate Tokenizer"):
        try_reading(b"{}\n{}")


def test_tokenizer_that_aborts_its_process_does_not_abort_this_one() -> None:
    """Its first four bytes announce eight gigabytes of data."""
    content = content_with(normalizer=precompiled(b"\xff\xff\xff\xffabcd"))

    with pytest.raises(Failure, match="crashes the process that loads it, with status -6: memory allocation"):
        load_tokenizer(TokenizerRef("huggingface", "abc"), content)


def test_tokenizer_that_fails_on_ordinary_text_is_refused() -> None:
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}

    with pytest.raises(Failure, match="does not accept the text"):
        try_reading(content_with(pre_tokenizer=regex))


def test_tokenizer_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "TRIAL_S_MAX", 0.001)

    with pytest.raises(Failure, match="takes more than"):
        try_reading(content_with())
