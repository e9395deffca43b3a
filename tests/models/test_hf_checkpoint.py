"""A model folder: its properties are read from all the files and fields in which models store them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from services.models.hf_checkpoint import read_model_folder
from services.models.tokenizers.byte_level import EOS, VOCAB_SIZE
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.model_folder import CHAT_TEMPLATE, CONTEXT_LENGTH, END, bytes_tokenizer, make_model_folder

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.0]]}


def test_folder_has_all_properties_that_a_worker_needs(tmp_path: Path) -> None:
    folder = read_model_folder(make_model_folder(tmp_path))

    assert (folder.vocab_size, folder.context_length, folder.end_ids) == (VOCAB_SIZE, CONTEXT_LENGTH, (EOS,))
    assert (folder.chat_template, folder.bos_token, folder.eos_token) == (CHAT_TEMPLATE, "", END)
    assert folder.tokenizer.kind == "huggingface"
    assert folder.tokenizer.sha256 == hashlib.sha256(folder.tokenizer_content).hexdigest()


def test_tokenizer_content_can_be_loaded_by_a_frontend(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(read_model_folder(make_model_folder(tmp_path)).tokenizer_content)

    assert tokenizer.encode(f"é 🎉{END}", add_special=True) == [*"é 🎉".encode(), EOS]
    assert tokenizer.token_bytes == (*(bytes((value,)) for value in range(256)), b"")


def test_tokenizer_content_depends_only_on_the_files(tmp_path: Path) -> None:
    folders = [read_model_folder(make_model_folder(tmp_path / name)) for name in "ab"]

    assert folders[0].tokenizer == folders[1].tokenizer


def test_special_tokens_of_all_files_have_no_text(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    changed = {
        "tokenizer_config.json": {"unk_token": {"content": "a"}, "additional_special_tokens": ["b", {"content": "c"}]},
        "special_tokens_map.json": {"pad_token": "d", "extra_special_tokens": {"image_token": "e"}},
    }

    folder = read_model_folder(make_model_folder(tmp_path, changed))

    token_bytes = HuggingFaceTokenizer(folder.tokenizer_content).token_bytes
    assert [token_bytes[ord(name)] for name in names] == [b""] * 5
    assert token_bytes[ord("f")] == b"f"


@pytest.mark.parametrize(
    ("changed", "end_ids"),
    [
        ({"generation_config.json": {"eos_token_id": [7, EOS, 8]}}, (EOS, 7, 8)),
        ({"generation_config.json": None, "config.json": {"eos_token_id": 9}}, (EOS, 9)),
        ({"generation_config.json": {}, "config.json": {"text_config": {"eos_token_id": 9}}}, (EOS, 9)),
        ({"generation_config.json": {"eos_token_id": 0}, "tokenizer_config.json": {}}, (0,)),
        ({"generation_config.json": None, "tokenizer_config.json": None, "config.json": None}, ()),
        ({"tokenizer_config.json": {"eos_token": {"content": "a"}}}, (97, EOS)),
    ],
)
def test_end_ids_are_those_of_the_tokenizer_and_of_the_model(
    tmp_path: Path, changed: dict[str, Any], end_ids: tuple[int, ...]
) -> None:
    assert read_model_folder(make_model_folder(tmp_path, changed)).end_ids == end_ids


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 7}, 7),
        ({"n_positions": 7}, 7),
        ({"text_config": {"max_position_embeddings": 7}}, 7),
        ({}, None),
        (None, None),
    ],
)
def test_context_length_is_found_under_each_name(tmp_path: Path, config: Any, length: int | None) -> None:
    assert read_model_folder(make_model_folder(tmp_path, {"config.json": config})).context_length == length


@pytest.mark.parametrize(
    ("changed", "vocab_size"),
    [
        ({"config.json": {"vocab_size": 300}}, 300),
        ({"config.json": {"text_config": {"vocab_size": 300}}}, 300),
        ({"config.json": None}, VOCAB_SIZE),
        ({"config.json": None, "tokenizer.json": {"model": UNIGRAM}}, 2),
    ],
)
def test_vocab_size_is_the_models_or_else_the_tokenizers(
    tmp_path: Path, changed: dict[str, Any], vocab_size: int
) -> None:
    assert read_model_folder(make_model_folder(tmp_path, changed)).vocab_size == vocab_size


@pytest.mark.parametrize(
    ("changed", "template"),
    [
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, ""),
        ({"tokenizer_config.json": None}, ""),
        ({"chat_template.json": {"chat_template": "older file"}}, "older file"),
        ({"chat_template.json": {"chat_template": "older file"}, "chat_template.jinja": "newer\n"}, "newer\n"),
    ],
)
def test_chat_template_is_found_where_each_version_of_transformers_stores_it(
    tmp_path: Path, changed: dict[str, Any], template: str
) -> None:
    assert read_model_folder(make_model_folder(tmp_path, changed)).chat_template == template


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.json": None}, r"tokenizer\.json does not exist: give the folder of a model"),
        ({"tokenizer.json": "<html>"}, r"tokenizer\.json is not JSON"),
        ({"config.json": "[]"}, r"config\.json is not a JSON object"),
        ({"tokenizer.json": {}}, "not a model folder in Hugging Face's layout"),
        ({"tokenizer.json": bytes_tokenizer() | {"added_tokens": [1]}}, "not a model folder in Hugging Face's layout"),
        ({"config.json": {"text_config": 1}}, "not a model folder in Hugging Face's layout"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_invalid_folder_is_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_folder(make_model_folder(tmp_path, changed))


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the folder of a model"):
        read_model_folder(tmp_path / "nowhere")
