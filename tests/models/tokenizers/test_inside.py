"""What is tokenised inside the process needs little stack and little time, whatever the text is."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from services.isolation.bounds import Bounds
from services.models.hf_checkpoint import pack
from services.models.tokenizers import inside
from services.models.tokenizers.gguf import GgufTokenizer
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from services.models.tokenizers.inside import (
    CHARACTERS_INSIDE_MAX,
    NATIVE_INSIDE_MAX,
    RECURSIVE_INSIDE_MAX,
    SPLIT_BY_LOOPS,
    SPLIT_BY_RECURSION,
    STACK_SHARE,
    gguf_inside,
    huggingface_inside,
    recursive_max,
)
from tests.models.gguf_files import content_split_by
from tests.support.model_folder import bytes_tokenizer

MIB = 1 << 20
UNITS = (
    *("A", "a", " ", "\n", "!", "漢", "1", "é", "\u0301", "Aa", "aA", " \n", "$", "\t", "'", "a ", " a", "\r\n", "A1"),
    *("!a", "\u2028", "'S", "<|im_start|>", "<|im_start|> ", "  \n x", "👩‍👩‍👧", "\x00", "\ufffd", "한"),
)


def hostile_texts(size: int) -> list[str]:
    """Texts of about that many characters, each a run of something that splitters read at once."""
    runs = [unit * (size // len(unit)) for unit in UNITS]
    return [*runs, "漢" * (size // 2) + "A" * (size // 2), "<sentinel:" + "1" * (size - 10), " " * (size - 1) + "x"]


def survives(work: Callable[[], object], stack_bytes: int) -> bool:
    """Whether a forked process does the work on a stack of that size."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            threading.stack_size(stack_bytes)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return status == 0


def encode_all(tokenizer: GgufTokenizer, size: int) -> None:
    for text in hostile_texts(size):
        tokenizer.encode(text, add_special=True)


@pytest.mark.model
@pytest.mark.parametrize("splitter", sorted(SPLIT_BY_LOOPS))
def test_splitter_that_loops_needs_a_small_stack(splitter: str) -> None:
    tokenizer = GgufTokenizer(content_split_by(splitter))

    assert tokenizer.inside_characters_max == NATIVE_INSIDE_MAX
    assert survives(lambda: encode_all(tokenizer, NATIVE_INSIDE_MAX), MIB // 4)


@pytest.mark.model
@pytest.mark.parametrize("splitter", sorted(SPLIT_BY_RECURSION))
def test_splitter_that_recurses_needs_its_share_of_the_stack(splitter: str) -> None:
    tokenizer = GgufTokenizer(content_split_by(splitter))

    assert tokenizer.inside_characters_max == RECURSIVE_INSIDE_MAX
    assert survives(lambda: encode_all(tokenizer, RECURSIVE_INSIDE_MAX), 8 * MIB // STACK_SHARE)


@pytest.mark.model
@pytest.mark.parametrize("text", ["A", " ", "\n", "!", "漢"])
def test_splitter_that_recurses_crashes_on_a_long_run(text: str) -> None:
    """Otherwise the bound is no longer needed."""
    tokenizer = GgufTokenizer(content_split_by("tekken"))

    assert not survives(lambda: tokenizer.encode(text * 24_062, add_special=True), Bounds().stack_bytes_max)


@pytest.mark.model
def test_hostile_texts_take_little_time() -> None:
    tokenizer = GgufTokenizer(content_split_by("smollm"))

    for text in hostile_texts(NATIVE_INSIDE_MAX):
        begun = time.thread_time()
        tokenizer.encode(text, add_special=True)
        assert time.thread_time() - begun < 0.25, text[:10]


def test_unknown_splitter_is_never_inside() -> None:
    assert gguf_inside("gpt2", "from the future") == 0


def test_no_splitter_is_in_both_tables() -> None:
    assert not SPLIT_BY_LOOPS & SPLIT_BY_RECURSION


@pytest.mark.parametrize(
    ("stack_bytes", "characters"), [(-1, 1024), (8 * MIB, 1024), (64 * MIB, 1024), (MIB, 128), (128 << 10, 16), (0, 0)]
)
def test_recursion_is_bounded_by_the_stack(stack_bytes: int, characters: int) -> None:
    assert recursive_max(stack_bytes) == characters


def test_bytes_are_encoded_inside_up_to_the_largest_bound() -> None:
    from services.models.tokenizers.byte_level import ByteTokenizer

    assert ByteTokenizer.inside_characters_max == CHARACTERS_INSIDE_MAX


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split_by(expression: str) -> dict[str, object]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}


@pytest.mark.parametrize("expression", sorted(inside._EXPRESSIONS))
def test_known_expression_takes_time_in_proportion_to_the_text(expression: str) -> None:
    content = json.dumps(bytes_tokenizer() | {"pre_tokenizer": split_by(expression)}).encode()
    tokenizer = HuggingFaceTokenizer(pack(content, special_tokens=[], vocab_size=0))

    assert tokenizer.inside_characters_max == NATIVE_INSIDE_MAX
    for text in hostile_texts(NATIVE_INSIDE_MAX):
        begun = time.thread_time()
        tokenizer.encode(text, add_special=True)
        assert time.thread_time() - begun < 0.25, text[:10]


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "model", "characters"),
    [
        ({}, {}, "BPE", NATIVE_INSIDE_MAX),
        ({"type": "NFC"}, BYTE_LEVEL, "BPE", NATIVE_INSIDE_MAX),
        ({}, split_by("(a+)+$"), "BPE", 0),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {}, "BPE", NATIVE_INSIDE_MAX),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}, {}, "Unigram", 0),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "New"}]}, {}, "BPE", 0),
        ({"type": "Precompiled", "precompiled_charsmap": ""}, {}, "Unigram", 0),
        ({}, {}, "WordPiece", 0),
    ],
)
def test_hugging_face_tokeniser_is_inside_if_all_its_parts_are_known(
    normalizer: dict[str, object], pre_tokenizer: dict[str, object], model: str, characters: int
) -> None:
    assert huggingface_inside(normalizer, pre_tokenizer, model) == characters
