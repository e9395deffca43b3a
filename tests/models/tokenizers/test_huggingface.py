"""The Hugging Face tokeniser: the library's ids from what the worker sent alone, and the exact bytes of every token."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from time import thread_time
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from services.core.errors import Failure, Reason
from services.core.interface import Delta
from services.core.model_card import TokenizerRef
from services.frontend.layers.detokenize import Detokenizer
from services.models.hf_checkpoint import pack
from services.models.tokenizers import huggingface, load_tokenizer
from services.models.tokenizers.byte_level import EOS
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.doubles import Collected
from tests.support.model_folder import END, byte_fallback_bpe, byte_level_bpe, bytes_tokenizer, smollm2_tokenizer

TEXTS = [
    "Hello, world!",
    "漢字とかな交じり文、한국어, العربية",
    "emoji 🎉👩‍👩‍👧‍👦🇨🇭 and ﷽",
    "def f(x):\n\treturn  x ** 2  # ½\r\n",
    "  spaces   and\n\n\nlines  ",
    "nul \0 and \x7f",
    "word " * 20_000,
    "",
]
SPM_NAMES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab", "<0xZZ>"]
SPM = byte_fallback_bpe(
    {name: token for token, name in enumerate(SPM_NAMES)}, ["▁ a", "▁a b"], {"<unk>": 0, "<s>": 1, "</s>": 2}
)
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {END: {"id": END, "ids": [EOS], "tokens": [END]}},
}


def tokenizer_of(
    tokenizer: Mapping[str, Any], *, vocab_size: int = 0, special_tokens: Sequence[str] = ()
) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(content_of(tokenizer, vocab_size=vocab_size, special_tokens=special_tokens))


def content_of(tokenizer: Mapping[str, Any], *, vocab_size: int = 0, special_tokens: Sequence[str] = ()) -> bytes:
    return pack(json.dumps(tokenizer).encode(), special_tokens=special_tokens, vocab_size=vocab_size)


def changed(**parts: Any) -> dict[str, Any]:
    """The tokeniser of bytes with other parts."""
    return bytes_tokenizer() | parts


def decoded(tokenizer: HuggingFaceTokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token] for token in ids)


# A real vocabulary


@pytest.fixture(scope="module")
def real() -> HuggingFaceTokenizer:
    return tokenizer_of(smollm2_tokenizer())


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\n1234<|im_end|>"], ids=lambda text: text[:12])
def test_ids_and_bytes_are_those_of_the_same_vocabulary_in_a_gguf_file(real: HuggingFaceTokenizer, text: str) -> None:
    from services.models.download import resolve
    from services.models.tokenizers.gguf import GgufTokenizer, tokenizer_content

    gguf = GgufTokenizer(tokenizer_content(resolve("smollm2")))

    assert real.encode(text, add_special=False) == gguf.encode(text, add_special=False)
    assert real.token_bytes == gguf.token_bytes


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_the_bytes_of_the_tokens_of_a_text_are_the_text(real: HuggingFaceTokenizer, text: str) -> None:
    assert decoded(real, real.encode(text, add_special=False)) == text.encode()


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, " " * 1000, "=" * 1000], ids=lambda text: text[:12])
def test_no_token_stands_for_more_characters_than_the_longest(real: HuggingFaceTokenizer, text: str) -> None:
    assert len(real.encode(text, add_special=False)) * real.token_characters_max >= len(text)


@pytest.mark.model
def test_a_character_that_comes_in_pieces_is_shown_once_it_is_whole(real: HuggingFaceTokenizer) -> None:
    collected = Collected()
    presenter = Detokenizer(collected, real.token_bytes, ())

    ids = real.encode("a漢🎉", add_special=False)
    for position, token in enumerate(ids):
        presenter.deliver(Delta(position, (token,)))

    assert collected.text == "a漢🎉"
    assert [delta.text for delta in collected.deltas if delta.text] == ["a", "漢", "🎉"]
    assert len(ids) > 5


@pytest.mark.model
def test_a_long_text_does_not_hold_up_other_threads(real: HuggingFaceTokenizer) -> None:
    """The library's method for a single text does: a prompt of a megabyte stopped all streams for half a second."""
    text = "Two words, é and 12. " * 50_000

    def encode() -> float:
        """Seconds of the processor that it takes."""
        began = thread_time()
        real.encode(text, add_special=False)
        return thread_time() - began

    began = thread_time()
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(encode)
        while not encoding.done():
            pass
    had_s = thread_time() - began

    assert had_s > encoding.result() / 4, "of the processor they have about the same"


# Ways of spelling


def test_all_ways_of_spelling_bytes_agree_with_the_library() -> None:
    for tokenizer in (bytes_tokenizer(), SPM):
        ours, library = tokenizer_of(tokenizer), Library.from_str(json.dumps(tokenizer))
        for text in ("a ab b", "é漢🎉", "x\ny"):
            ids = ours.encode(text, add_special=False)
            assert decoded(ours, ids).decode().removeprefix(" ") == library.decode(ids) == text


def test_a_byte_level_token_that_is_no_spelling_of_bytes_is_its_own_text() -> None:
    vocab = bytes_tokenizer()["model"]["vocab"] | {"漢": 256, "a b": 257}

    tokenizer = tokenizer_of(byte_level_bpe(vocab, [], special={}))

    assert tokenizer.token_bytes[256:] == ("漢".encode(), b"a b")


def test_a_sentencepiece_vocabulary_has_spaces_for_marks_and_bytes_for_what_it_lacks() -> None:
    tokenizer = tokenizer_of(SPM)

    ids = tokenizer.encode("ab é", add_special=False)

    assert [tokenizer.token_bytes[token] for token in ids] == [b" ab", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.token_bytes[-1] == b"<0xZZ>", "no byte is spelled so"


def test_a_byte_is_final_whatever_step_comes_after_it() -> None:
    blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Sequence", "decoders": [blank]}]}

    tokenizer = tokenizer_of(SPM | {"decoder": decoder})

    assert tokenizer.token_bytes == tokenizer_of(SPM).token_bytes


def test_a_metaspace_decoder_has_spaces_for_its_marks() -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]]}

    tokenizer = tokenizer_of({"added_tokens": [], "model": model, "pre_tokenizer": metaspace, "decoder": metaspace})

    assert tokenizer.encode("ab a", add_special=False) == [1, 2, 1]
    assert tokenizer.token_bytes == (b"<unk>", b" a", b"b")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_vocabulary_whose_spelling_is_unknown_is_refused(decoder: Any) -> None:
    with pytest.raises(Failure, match="serve a model whose tokeniser is byte-level"):
        tokenizer_of(changed(decoder=decoder))


# Special tokens


def test_special_tokens_in_a_text_are_read_as_such_and_have_no_text() -> None:
    tokenizer = tokenizer_of(bytes_tokenizer())

    ids = tokenizer.encode(f"a{END}b", add_special=False)

    assert ids == [97, EOS, 98]
    assert decoded(tokenizer, ids) == b"ab"


def test_tokens_that_other_files_of_the_model_call_special_have_no_text_either() -> None:
    ordinary = [{"id": EOS, "content": END, "special": False}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = changed(added_tokens=[one | flags for one in ordinary])

    assert tokenizer_of(tokenizer).token_bytes[EOS] == END.encode()
    assert tokenizer_of(tokenizer, special_tokens=[END]).token_bytes[EOS] == b""


def test_what_the_model_expects_is_added_only_where_it_is_asked_for() -> None:
    tokenizer = tokenizer_of(changed(post_processor=BOS_FIRST))

    assert tokenizer.encode("a", add_special=True) == [EOS, 97]
    assert tokenizer.encode("a", add_special=False) == [97]


# Bounds


def test_a_text_is_never_cut_or_filled_up() -> None:
    """Many files say how their model was trained: cut to 512 tokens, or filled up to as many."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": EOS,
        "pad_type_id": 0,
        "pad_token": END,
    }

    assert tokenizer_of(changed(truncation=cut, padding=fill)).encode("abcd", add_special=True) == [97, 98, 99, 100]


def test_ids_that_only_the_model_has_are_without_text() -> None:
    assert tokenizer_of(bytes_tokenizer(), vocab_size=300).token_bytes[256:] == (b"",) * 44


def test_half_a_surrogate_pair_becomes_a_question_mark() -> None:
    assert tokenizer_of(bytes_tokenizer()).encode("\udcff", add_special=False) == [ord("?")]


def test_characters_that_are_composed_first_are_not_taken_for_a_longer_text() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["é", -1.0]]}
    tokenizer = tokenizer_of({"model": model, "normalizer": {"type": "NFC"}, "decoder": {"type": "Fuse"}})

    count = len(tokenizer.encode("e\u0301" * 10, add_special=False))

    assert count * tokenizer.token_characters_max >= 20


def test_a_vocabulary_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "TOKENS_MAX", 257)
    tokenizer_of(bytes_tokenizer())
    vocab = bytes_tokenizer()["model"]["vocab"] | {"zz": 300}

    with pytest.raises(Failure, match="301 token ids"):
        tokenizer_of(byte_level_bpe(vocab, [], special={}))


@pytest.mark.parametrize(
    ("pattern", "content", "is_taken"),
    [
        ({"String": "a"}, "aa", True),
        ({"String": "a"}, "aa" * 20, False),
        ({"String": "a" * 20}, "a" * 40, True),
        ({"String": ""}, "aa" * 20, False),
        ({"Regex": "a*"}, "aa" * 20, False),
    ],
)
def test_a_normaliser_that_makes_much_of_little_is_refused(pattern: Any, content: str, is_taken: bool) -> None:
    """A text of 40 characters would have become one of terabytes, and the process would have been killed."""
    step = {"type": "Replace", "pattern": pattern, "content": content}
    tokenizer = changed(normalizer={"type": "Sequence", "normalizers": [step] * 2})

    if is_taken:
        tokenizer_of(tokenizer)
    else:
        with pytest.raises(Failure, match="characters of one"):
            tokenizer_of(tokenizer)


# What is damaged


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{}", b"<html>", b"[]\n{}", b'{"vocab_size": "x", "special_tokens": []}\n', content_of({"model": 1})],
)
def test_a_damaged_content_is_refused(damaged: bytes) -> None:
    with pytest.raises(Failure, match="cannot be read"):
        HuggingFaceTokenizer(damaged)


def test_one_that_the_library_breaks_on_is_refused() -> None:
    """A panic of the library is no Exception: it went past every handler and ended the process."""
    broken = deepcopy(bytes_tokenizer())
    broken["model"] |= {"continuing_subword_prefix": "ééé", "merges": [["a", "b"]]}

    with pytest.raises(Failure, match="breaks the library"):
        tokenizer_of(broken)


def test_a_text_that_the_library_breaks_on_is_its_requests_failure() -> None:
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = tokenizer_of(changed(pre_tokenizer=regex))

    with pytest.raises(Failure) as caught:
        tokenizer.encode("a" * 40 + "b", add_special=False)

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "prompt")


def test_it_is_loaded_by_its_reference() -> None:
    content = content_of(bytes_tokenizer())
    ref = TokenizerRef("huggingface", hashlib.sha256(content).hexdigest())

    assert load_tokenizer(ref, content).encode("a", add_special=False) == [97]


def test_without_the_library_the_failure_says_what_to_install() -> None:
    script = """
import sys
sys.modules["tokenizers"] = None
from services.core.model_card import TokenizerRef
from services.core.errors import Failure
from services.models.tokenizers import load_tokenizer
try:
    load_tokenizer(TokenizerRef("huggingface", "abc"), b"")
except Failure as failure:
    print(failure.detail)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert "pip install 'unbroken[huggingface]'" in done.stdout
