"""The folders that tests make are read by the library that models are made for."""

from pathlib import Path

from tokenizers import Tokenizer

from services.tokenizers.byte_level import EOS
from tests.model_folder import END, byte_fallback_bpe, make_model_folder, write_folder


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_token_of_the_plain_one_is_a_byte_as_in_the_mocker(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_model_folder(tmp_path))

    assert tokenizer.encode(f"é 🎉{END}").ids == [*"é 🎉".encode(), EOS]
    assert tokenizer.decode(list("é 🎉".encode())) == "é 🎉"


def test_the_other_kind_begins_words_with_a_mark_and_falls_back_to_bytes(tmp_path: Path) -> None:
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "▁", "a", "▁a"]
    vocab = {name: token for token, name in enumerate(names)}
    write_folder(tmp_path, {"tokenizer.json": byte_fallback_bpe(vocab, ["▁ a"], {"<unk>": 0})})
    tokenizer = tokenizer_of(tmp_path)

    encoded = tokenizer.encode("a é")

    assert encoded.tokens == ["▁a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "a é"
