"""A model's folder: what its files say of it, in the many ways in which models say it."""

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


def test_a_folder_says_all_that_a_worker_tells_of_its_model(tmp_path: Path) -> None:
    folder = read_model_folder(make_model_folder(tmp_path))

    assert (folder.vocab_size, folder.context_length, folder.end_ids) == (VOCAB_SIZE, CONTEXT_LENGTH, (EOS,))
    assert (folder.chat_template, folder.bos_token, folder.eos_token) == (CHAT_TEMPLATE, "", END)
    assert folder.tokenizer.kind == "huggingface"
    assert folder.tokenizer.sha256 == hashlib.sha256(folder.tokenizer_content).hexdigest()


def test_a_frontend_reads_the_content_as_the_mockers_tokens(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(read_model_folder(make_model_folder(tmp_path)).tokenizer_content)

    assert tokenizer.encode(f"é 🎉{END}", add_special=True) == [*"é 🎉".encode(), EOS]
    assert tokenizer.token_bytes == (*(bytes((value,)) for value in range(256)), b"")


def test_the_content_depends_on_the_files_alone(tmp_path: Path) -> None:
    folders = [read_model_folder(make_model_folder(tmp_path / name)) for name in "ab"]

    assert folders[0].tokenizer == folders[1].tokenizer


def test_tokens_that_any_file_calls_special_have_no_text(tmp_path: Path) -> None:
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
def test_an_answer_ends_with_what_the_tokeniser_names_and_what_the_model_does(
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
def test_the_context_is_what_the_model_calls_it(tmp_path: Path, config: Any, length: int | None) -> None:
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
def test_the_vocabulary_is_the_models_or_else_the_tokenisers(
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
def test_the_chat_template_is_where_any_version_of_transformers_put_it(
    tmp_path: Path, changed: dict[str, Any], template: str
) -> None:
    assert read_model_folder(make_model_folder(tmp_path, changed)).chat_template == template


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokenizer.json": None}, r"there is no .*tokenizer\.json: give the folder of a model"),
        ({"tokenizer.json": "<html>"}, r"tokenizer\.json is not JSON"),
        ({"config.json": "[]"}, r"config\.json is not a JSON object"),
        ({"tokenizer.json": {}}, "not laid out as a model of Hugging Face"),
        ({"tokenizer.json": bytes_tokenizer() | {"added_tokens": [1]}}, "not laid out as a model of Hugging Face"),
        ({"config.json": {"text_config": 1}}, "not laid out as a model of Hugging Face"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_folder_that_is_none_is_refused_with_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_model_folder(make_model_folder(tmp_path, changed))


def test_no_folder_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the folder of a model"):
        read_model_folder(tmp_path / "nowhere")
