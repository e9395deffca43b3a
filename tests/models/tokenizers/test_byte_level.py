"""The byte tokeniser: each token is a byte of UTF-8, and decoding restores the text."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.model_card import TokenizerRef
from services.models.tokenizers import load_tokenizer
from services.models.tokenizers.byte_level import EOS, VOCAB_SIZE, ByteTokenizer


def decode(token_ids: list[int]) -> str:
    return b"".join(ByteTokenizer.token_bytes[token] for token in token_ids).decode()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_decoding_restores_the_encoded_text(text: str) -> None:
    assert decode(ByteTokenizer().encode(text, add_special=True)) == text


def test_character_has_one_token_for_each_byte() -> None:
    assert ByteTokenizer().encode("é🎉", add_special=False) == [0xC3, 0xA9, 0xF0, 0x9F, 0x8E, 0x89]


def test_no_special_tokens_are_added() -> None:
    assert ByteTokenizer().encode("", add_special=True) == []


def test_lone_surrogate_becomes_a_question_mark() -> None:
    assert decode(ByteTokenizer().encode("a\ud800b", add_special=False)) == "a?b"


def test_end_token_has_no_text() -> None:
    assert len(ByteTokenizer.token_bytes) == VOCAB_SIZE == EOS + 1
    assert ByteTokenizer.token_bytes[EOS] == b""
    assert all(ByteTokenizer.token_bytes[value] == bytes([value]) for value in range(256))


def test_kind_bytes_loads_the_byte_tokenizer() -> None:
    assert isinstance(load_tokenizer(TokenizerRef("bytes"), b""), ByteTokenizer)
