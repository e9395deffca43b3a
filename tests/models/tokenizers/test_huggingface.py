"""The Hugging Face tokeniser: gives the library's ids from the worker's content, and the exact bytes of each token."""

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
from tests.integration.harness.waiting import wait_until
from tests.support.clock import WAIT_S
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
    """The byte tokeniser with some parts replaced."""
    return bytes_tokenizer() | parts


def decoded(tokenizer: HuggingFaceTokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[token] for token in ids)


# A real vocabulary


@pytest.fixture(scope="module")
def real() -> HuggingFaceTokenizer:
    return tokenizer_of(smollm2_tokenizer())


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\n1234<|im_end|>"], ids=lambda text: text[:12])
def test_ids_and_bytes_equal_those_of_the_same_vocabulary_in_a_gguf_file(real: HuggingFaceTokenizer, text: str) -> None:
    from services.models.download import resolve
    from services.models.tokenizers.gguf import GgufTokenizer, tokenizer_content

    gguf = GgufTokenizer(tokenizer_content(resolve("smollm2")))

    assert real.encode(text, add_special=False) == gguf.encode(text, add_special=False)
    assert real.token_bytes == gguf.token_bytes
    assert real.special_tokens == gguf.special_tokens


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_token_bytes_of_a_text_are_its_bytes(real: HuggingFaceTokenizer, text: str) -> None:
    assert decoded(real, real.encode(text, add_special=False)) == text.encode()


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, " " * 1000, "=" * 1000], ids=lambda text: text[:12])
def test_no_token_has_more_characters_than_the_longest(real: HuggingFaceTokenizer, text: str) -> None:
    assert len(real.encode(text, add_special=False)) * real.token_characters_max >= len(text)


@pytest.mark.model
def test_character_split_over_tokens_is_shown_once_complete(real: HuggingFaceTokenizer) -> None:
    collected = Collected()
    presenter = Detokenizer(collected, real, ())

    ids = real.encode("a漢🎉", add_special=False)
    for position, token in enumerate(ids):
        presenter.deliver(Delta(position, (token,)))

    assert collected.text == "a漢🎉"
    assert [delta.text for delta in collected.deltas if delta.text] == ["a", "漢", "🎉"]
    assert len(ids) > 5


@pytest.mark.model
def test_encoding_a_long_text_does_not_block_other_threads(real: HuggingFaceTokenizer) -> None:
    """The library's function for a single text does: a prompt of a megabyte blocked all streams for half a second."""
    text = "Two words, é and 12. " * 50_000

    def encode() -> float:
        """Encode the text. Returns the CPU seconds used."""
        began = thread_time()
        real.encode(text, add_special=False)
        return thread_time() - began

    def share_beside_it() -> float:
        """The CPU time that this thread gets while another one encodes the text, relative to that of the other one."""
        began = thread_time()
        with ThreadPoolExecutor(1) as pool:
            encoding = pool.submit(encode)
            while not encoding.done():
                pass
        return (thread_time() - began) / encoding.result()

    # The scheduler of a busy machine may prefer one of them for a while. A thread that holds the lock never shares.
    wait_until(lambda: share_beside_it() > 1 / 4)


# Spellings of bytes


def test_every_spelling_of_bytes_agrees_with_the_library() -> None:
    for tokenizer in (bytes_tokenizer(), SPM):
        ours, library = tokenizer_of(tokenizer), Library.from_str(json.dumps(tokenizer))
        for text in ("a ab b", "é漢🎉", "x\ny"):
            ids = ours.encode(text, add_special=False)
            assert decoded(ours, ids).decode().removeprefix(" ") == library.decode(ids) == text


def test_byte_level_token_that_spells_no_bytes_is_plain_text() -> None:
    vocab = bytes_tokenizer()["model"]["vocab"] | {"漢": 256, "a b": 257}

    tokenizer = tokenizer_of(byte_level_bpe(vocab, [], special={}))

    assert tokenizer.token_bytes[256:] == ("漢".encode(), b"a b")


def test_sentencepiece_vocabulary_uses_spaces_for_marks_and_byte_fallback() -> None:
    tokenizer = tokenizer_of(SPM)

    ids = tokenizer.encode("ab é", add_special=False)

    assert [tokenizer.token_bytes[token] for token in ids] == [b" ab", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.token_bytes[-1] == b"<0xZZ>", "this name spells no byte"


def test_decoded_byte_is_not_changed_by_later_steps() -> None:
    blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Sequence", "decoders": [blank]}]}

    tokenizer = tokenizer_of(SPM | {"decoder": decoder})

    assert tokenizer.token_bytes == tokenizer_of(SPM).token_bytes


def test_metaspace_decoder_replaces_its_marks_by_spaces() -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]]}

    tokenizer = tokenizer_of({"added_tokens": [], "model": model, "pre_tokenizer": metaspace, "decoder": metaspace})

    assert tokenizer.encode("ab a", add_special=False) == [1, 2, 1]
    assert tokenizer.token_bytes == (b"<unk>", b" a", b"b")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unknown_decoder_is_refused(decoder: Any) -> None:
    with pytest.raises(Failure, match="serve a model whose tokeniser is byte-level"):
        tokenizer_of(changed(decoder=decoder))


# Special tokens


def test_special_tokens_in_a_text_are_recognised_and_have_no_text() -> None:
    tokenizer = tokenizer_of(bytes_tokenizer())

    ids = tokenizer.encode(f"a{END}b", add_special=False)

    assert ids == [97, EOS, 98]
    assert decoded(tokenizer, ids) == b"ab"


def test_special_tokens_in_a_text_are_text_where_they_are_not_to_be_parsed() -> None:
    tokenizer = tokenizer_of(changed(post_processor=BOS_FIRST))

    assert tokenizer.encode(f"a{END}", add_special=True, parse_special=False) == [EOS, 97, *END.encode()]
    assert tokenizer.encode(f"a{END}", add_special=True) == [EOS, 97, EOS], "the vocabulary itself is not changed"


def test_special_tokens_of_other_files_have_no_text() -> None:
    ordinary = [{"id": EOS, "content": END, "special": False}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = changed(added_tokens=[one | flags for one in ordinary])

    assert tokenizer_of(tokenizer).token_bytes[EOS] == END.encode()
    assert tokenizer_of(tokenizer, special_tokens=[END]).token_bytes[EOS] == b""
    assert tokenizer_of(tokenizer).special_tokens == {}
    assert tokenizer_of(tokenizer, special_tokens=[END]).special_tokens == {EOS: END}


def test_special_tokens_are_added_only_on_request() -> None:
    tokenizer = tokenizer_of(changed(post_processor=BOS_FIRST))

    assert tokenizer.encode("a", add_special=True) == [EOS, 97]
    assert tokenizer.encode("a", add_special=False) == [97]


# Text in pieces: added tokens by id, and text in which none is recognised


def with_added(tokenizer: dict[str, Any], **flags_of: Mapping[str, Any]) -> dict[str, Any]:
    """The tokeniser with further added tokens: spelling → its flags and id."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    more = [{"content": name, **usual, **flags} for name, flags in flags_of.items()]
    return tokenizer | {"added_tokens": [*tokenizer["added_tokens"], *more]}


def test_pieces_are_encoded_like_the_whole_text() -> None:
    for tokenizer in (tokenizer_of(bytes_tokenizer()), tokenizer_of(SPM)):
        for end, token in tokenizer.added_tokens.items():
            whole = tokenizer.encode(f"ab{end}a  b{end}", add_special=False)

            assert tokenizer.encode_pieces(["ab", token, "a  b", token]) == whole


def test_text_of_pieces_is_text() -> None:
    tokenizer = tokenizer_of(bytes_tokenizer())

    assert tokenizer.encode_pieces([END, EOS, f"a{END}"]) == [*END.encode(), EOS, 97, *END.encode()]
    assert tokenizer.encode_pieces([]) == []


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_only_the_first_word_of_the_text_is_a_first_word(scheme: str) -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    parts = {"normalizer": None, "pre_tokenizer": metaspace, "decoder": metaspace}
    tokenizer = tokenizer_of(byte_fallback_bpe({**SPM["model"]["vocab"]}, ["▁ a", "▁a b"], {"</s>": 2}, **parts))

    assert tokenizer.encode_pieces(["ab", 2, "ab"]) == tokenizer.encode("ab</s>ab", add_special=False)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
def test_added_token_strips_the_text_around_it(flags: dict[str, bool]) -> None:
    tokenizer = tokenizer_of(with_added(bytes_tokenizer(), **{"<x>": {"id": 257, **flags}}))

    assert tokenizer.encode_pieces(["a ", 257, " b"]) == tokenizer.encode("a <x> b", add_special=False)


def test_added_tokens_of_blanks_are_recognised_in_pieces_with_their_own_ids() -> None:
    added = {"<x>": {"id": 257}, "\n\n": {"id": 258, "special": False}, "<y>": {"id": 259}}
    tokenizer = tokenizer_of(with_added(bytes_tokenizer(), **added))

    assert tokenizer.added_tokens == {END: EOS, "<x>": 257, "<y>": 259}
    assert tokenizer.encode_pieces(["\n\n", 259, "\n\n", 257]) == [258, 259, 258, 257]
    assert tokenizer.encode("<x>\n\n", add_special=False, parse_special=False) == [*b"<x>", 258]


def test_vocabulary_that_has_a_control_token_as_a_word_does_not_give_it_to_a_text() -> None:
    """As SentencePiece's unigram models do: control tokens have the best score of all."""
    vocab = [["?", 0.0], ["</s>", 0.0], *([one, -5.0] for one in "</s>a▁")]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 1, "content": "</s>", "special": True, **flags}]
    tokenizer = tokenizer_of({"added_tokens": added, "model": model, "decoder": {"type": "Fuse"}})

    ids = tokenizer.encode_pieces(["a</s>a", 1])

    assert ids.count(1) == 1
    assert decoded(tokenizer, ids) == b"a</s>a"


@pytest.mark.parametrize(
    ("normalizer", "rewrites"),
    [
        (None, False),
        ({"type": "NFC"}, False),
        ({"type": "Prepend", "prepend": "▁"}, False),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, False),
        ({"type": "NFKC"}, True),
        ({"type": "Lowercase"}, True),
        ({"type": "Replace", "pattern": {"String": "{"}, "content": "<"}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, True),
    ],
)
def test_tokenizer_says_whether_normalisation_may_spell_tokens(normalizer: Any, rewrites: bool) -> None:
    assert tokenizer_of(changed(normalizer=normalizer)).rewrites_text == rewrites


# Bounds


def test_text_is_never_truncated_or_padded() -> None:
    """Many files contain training settings, such as truncation or padding to 512 tokens."""
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


def test_ids_that_only_the_model_has_have_no_text() -> None:
    padded = tokenizer_of(bytes_tokenizer(), vocab_size=300)

    assert padded.token_bytes[256:] == (b"",) * 44
    assert padded.special_tokens == {EOS: END}, "an id without a token has no spelling"


def test_lone_surrogate_becomes_a_question_mark() -> None:
    assert tokenizer_of(bytes_tokenizer()).encode("\udcff", add_special=False) == [ord("?")]


def test_token_characters_max_allows_for_composed_characters() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["é", -1.0]]}
    tokenizer = tokenizer_of({"model": model, "normalizer": {"type": "NFC"}, "decoder": {"type": "Fuse"}})

    count = len(tokenizer.encode("e\u0301" * 10, add_special=False))

    assert count * tokenizer.token_characters_max >= 20


def test_vocabulary_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "TOKENS_MAX", 257)
    tokenizer_of(bytes_tokenizer())
    vocab = bytes_tokenizer()["model"]["vocab"] | {"zz": 300}

    with pytest.raises(Failure, match="301 token ids"):
        tokenizer_of(byte_level_bpe(vocab, [], special={}))


@pytest.mark.parametrize(
    ("pattern", "content", "is_accepted"),
    [
        ({"String": "a"}, "aa", True),
        ({"String": "a"}, "aa" * 20, False),
        ({"String": "a" * 20}, "a" * 40, True),
        ({"String": ""}, "aa" * 20, False),
        ({"Regex": "a*"}, "aa" * 20, False),
    ],
)
def test_normalizer_that_expands_text_beyond_the_bound_is_refused(
    pattern: Any, content: str, is_accepted: bool
) -> None:
    """Such a normaliser turned 40 characters into terabytes, and the process was killed."""
    step = {"type": "Replace", "pattern": pattern, "content": content}
    tokenizer = changed(normalizer={"type": "Sequence", "normalizers": [step] * 2})

    if is_accepted:
        tokenizer_of(tokenizer)
    else:
        with pytest.raises(Failure, match="characters of one"):
            tokenizer_of(tokenizer)


# Damaged content


@pytest.mark.parametrize(
    "damaged",
    [b"", b"{}", b"<html>", b"[]\n{}", b'{"vocab_size": "x", "special_tokens": []}\n', content_of({"model": 1})],
)
def test_damaged_content_is_refused(damaged: bytes) -> None:
    with pytest.raises(Failure, match="cannot be read"):
        HuggingFaceTokenizer(damaged)


def test_content_that_crashes_the_library_is_refused() -> None:
    """A panic of the library does not derive from Exception: it passed every handler and ended the process."""
    broken = deepcopy(bytes_tokenizer())
    broken["model"] |= {"continuing_subword_prefix": "ééé", "merges": [["a", "b"]]}

    with pytest.raises(Failure, match="crashes the library"):
        tokenizer_of(broken)


def test_text_that_the_library_fails_on_fails_its_request() -> None:
    regex = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = tokenizer_of(changed(pre_tokenizer=regex))

    with pytest.raises(Failure) as caught:
        tokenizer.encode("a" * 40 + "b", add_special=False)

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "prompt")


def test_tokenizer_is_loaded_by_its_reference() -> None:
    content = content_of(bytes_tokenizer())
    ref = TokenizerRef("huggingface", hashlib.sha256(content).hexdigest())

    assert load_tokenizer(ref, content).encode("a", add_special=False) == [97]


def test_failure_without_the_library_says_what_to_install() -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)

    assert "pip install 'unbroken[huggingface]'" in done.stdout
