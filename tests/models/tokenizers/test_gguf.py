"""The GGUF tokeniser: gives llama.cpp's ids from the head of the file alone, and the exact bytes of each token."""

import hashlib
import tempfile
from pathlib import Path

import pytest

from services.core.errors import Failure
from services.core.model_card import TokenizerRef
from services.models.download import resolve
from services.models.llama_cpp import llama_cpp
from services.models.tokenizers import load_tokenizer
from services.models.tokenizers.gguf import GgufTokenizer, tokenizer_content

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def content() -> bytes:
    return tokenizer_content(resolve("smollm2"))


@pytest.fixture(scope="module")
def tokenizer(content: bytes) -> GgufTokenizer:
    return GgufTokenizer(content)


def test_vocabulary_is_loaded_where_no_folder_can_be_written(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")

    assert GgufTokenizer(content).encode("Hello", add_special=False) == [19556]


TEXTS = [
    "Hello, world!",
    "漢字とかな交じり文、한국어, العربية",
    "emoji 🎉👩‍👩‍👧‍👦🇨🇭 and ﷽",
    "def f(x):\n\treturn  x ** 2  # ½\r\n",
    "  spaces   and\n\n\nlines  ",
    "nul \0 and \x7f",
    "word " * 20_000,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_token_bytes_of_a_text_are_its_bytes(tokenizer: GgufTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)

    assert b"".join(tokenizer.token_bytes[token] for token in ids) == text.encode()


def test_token_that_is_part_of_a_character_has_its_exact_bytes(tokenizer: GgufTokenizer) -> None:
    ids = tokenizer.encode("漢", add_special=False)

    assert [tokenizer.token_bytes[token] for token in ids] == [b"\xe6", b"\xbc", b"\xa2"]


def test_special_tokens_have_the_spelling_that_templates_write(tokenizer: GgufTokenizer) -> None:
    assert len(tokenizer.special_tokens) == 17
    assert [tokenizer.special_tokens[token] for token in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert not any(tokenizer.token_bytes[token] for token in tokenizer.special_tokens)


def test_special_tokens_in_a_text_are_recognised_and_have_no_text(tokenizer: GgufTokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", add_special=False)

    assert ids[0] == 1
    assert ids[-1] == 2
    assert b"".join(tokenizer.token_bytes[token] for token in ids) == b"user\nHi"


def test_special_tokens_in_a_text_are_text_where_they_are_not_to_be_parsed(tokenizer: GgufTokenizer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>"

    ids = tokenizer.encode(text, add_special=False, parse_special=False)

    assert not {1, 2} & set(ids)
    assert b"".join(tokenizer.token_bytes[token] for token in ids) == text.encode()


def test_added_tokens_are_those_that_a_text_can_spell(tokenizer: GgufTokenizer) -> None:
    assert len(tokenizer.added_tokens) == 17
    assert tokenizer.added_tokens["<|im_end|>"] == 2


def test_pieces_are_encoded_like_the_whole_text(tokenizer: GgufTokenizer) -> None:
    whole = tokenizer.encode("<|im_start|>user\nHi there<|im_end|>\n", add_special=False)

    assert tokenizer.encode_pieces([1, "user\nHi there", 2, "\n"]) == whole


def test_text_of_pieces_is_text(tokenizer: GgufTokenizer) -> None:
    text = "Hi<|im_end|>\n<|im_start|>system\n漢"

    ids = tokenizer.encode_pieces([text, 2])

    assert ids == [*tokenizer.encode(text, add_special=False, parse_special=False), 2]
    assert ids.count(2) == 1
    assert b"".join(tokenizer.token_bytes[token] for token in ids) == text.encode()


def test_user_defined_token_in_a_text_of_pieces_is_text(content: bytes) -> None:
    """llama.cpp recognises it in every text."""
    repo_name = 3
    tokenizer = GgufTokenizer(user_defined(content, token=repo_name))
    text = "Hi<repo_name> you"

    ids = tokenizer.encode_pieces([text, repo_name])

    assert repo_name in tokenizer.encode(text, add_special=False, parse_special=False)
    assert ids.count(repo_name) == 1
    assert b"".join(tokenizer.token_bytes[token] for token in ids[:-1]) == text.encode()


def test_sentencepiece_puts_no_space_inside_a_text_of_pieces(tmp_path: Path) -> None:
    """It puts one before each text between added tokens, and a text is cut to hide a user-defined token."""
    repo_name = 3
    tokenizer = GgufTokenizer(user_defined(sentencepiece(tmp_path), token=repo_name))

    ids = tokenizer.encode_pieces([2, "Hi<repo_name> you", repo_name, "Hi"])

    names = [tokenizer.token_bytes[token].decode() for token in ids]
    assert names == ["", " ", "Hi", "<", "repo", "_", "name", ">", " ", "you", "<repo_name>", " ", "Hi"]
    assert tokenizer.encode_pieces([2, "Hi", 2, "Hi"]) == tokenizer.encode(
        "<|im_end|>Hi<|im_end|>Hi", add_special=False
    )


def sentencepiece(folder: Path) -> bytes:
    """The vocabulary of the tests as one of SentencePiece's, with the tokens that it needs in place of others."""
    file = llama_cpp.GGUFContext.from_file(str(resolve("smollm2")))
    file.set_val_str("tokenizer.ggml.model", "llama")
    file.set_val_bool("tokenizer.ggml.add_space_prefix", True)
    file.write_to_file(str(folder / "model.gguf"), True)
    content = (folder / "model.gguf").read_bytes()
    for old, new in ((b"the", "▁".encode()), (b"~", b"\n")):
        place = content.index(length_and(old), content.index(b"tokenizer.ggml.tokens"))
        content = content[:place] + length_and(new) + content[place + len(length_and(old)) :]
    return content


def length_and(name: bytes) -> bytes:
    return len(name).to_bytes(8, "little") + name


def user_defined(content: bytes, token: int) -> bytes:
    """The same vocabulary with a token of type USER_DEFINED (4) in place of CONTROL (3)."""
    key = b"tokenizer.ggml.token_type"
    first = content.index(key) + len(key) + 4 + 4 + 8  # The value's type, that of its items, and their number.
    place = first + 4 * token
    assert content[place : place + 4] == (3).to_bytes(4, "little")
    return content[:place] + (4).to_bytes(4, "little") + content[place + 4 :]


def test_empty_text_has_no_tokens(tokenizer: GgufTokenizer) -> None:
    assert tokenizer.encode("", add_special=True) == []


def test_lone_surrogate_becomes_a_question_mark(tokenizer: GgufTokenizer) -> None:
    assert tokenizer.encode("\udcff", add_special=False) == tokenizer.encode("?", add_special=False)


def test_token_bytes_has_an_entry_for_every_id(tokenizer: GgufTokenizer) -> None:
    assert len(tokenizer.token_bytes) == 49_152


def test_content_does_not_contain_the_weights(content: bytes) -> None:
    assert len(content) < 2_000_000


def test_tokenizer_is_loaded_by_its_reference(content: bytes) -> None:
    ref = TokenizerRef("gguf", hashlib.sha256(content).hexdigest())

    assert load_tokenizer(ref, content).encode("Hello", add_special=False) == [19556]


def test_unknown_kind_of_vocabulary_is_refused(content: bytes) -> None:
    other = content.replace(
        b"tokenizer.ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0gpt2", b"tokenizer.ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0none"
    )

    with pytest.raises(Failure, match="kind 'none'"):
        GgufTokenizer(other)


@pytest.mark.parametrize("damaged", [b"", b"GGUF", b"<html>not a model</html>"])
def test_damaged_content_is_refused(damaged: bytes) -> None:
    with pytest.raises(Failure, match="cannot read"):
        GgufTokenizer(damaged)


def test_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "readme.gguf"
    file.write_text("not a model")

    with pytest.raises(ValueError, match="not a GGUF file"):
        tokenizer_content(file)


@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>" * 50, " " * 1000, "=" * 1000], ids=lambda text: text[:12])
def test_no_token_has_more_characters_than_the_longest(tokenizer: GgufTokenizer, text: str) -> None:
    count = len(tokenizer.encode(text, add_special=False))

    assert count * tokenizer.token_characters_max >= len(text)


def test_longest_token_is_found(tokenizer: GgufTokenizer) -> None:
    assert tokenizer.token_characters_max == 81
