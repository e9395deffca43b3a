"""What TensorRT-LLM is told at its start: all that requests rest on, and nothing that they could not bear."""

import sys
from pathlib import Path
from typing import Any

import pytest

from services.runtime.process import StartupError
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments, read_extra


def config(**given: Any) -> TrtLlmConfig:
    return TrtLlmConfig(model=Path("/models/m"), served_model_name="m", **given)


def test_all_that_requests_rest_on_is_passed_explicitly() -> None:
    assert llm_arguments(config(), 4096) == {
        "model": "/models/m",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 1,
        "max_batch_size": 64,
        "max_num_tokens": 8192,
        "max_seq_len": 4096,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
    }


def test_guided_decoding_needs_the_engines_own_tokeniser() -> None:
    arguments = llm_arguments(config(guided_decoding_backend="xgrammar"), 4096)

    assert (arguments["guided_decoding_backend"], arguments["skip_tokenizer_init"]) == ("xgrammar", False)


def test_what_has_no_flag_comes_from_the_file() -> None:
    extra = {
        "enable_attention_dp": True,
        "enable_iter_perf_stats": False,
        "kv_cache_config": {"tokens_per_block": 64},
    }
    made = config(extra=extra, tensor_parallel_size=4)

    arguments = llm_arguments(made, 4096)

    assert arguments["enable_attention_dp"] is True
    assert arguments["enable_iter_perf_stats"] is False
    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "tokens_per_block": 64}
    assert (made.rank_count, made.block_tokens, made.has_stats) == (4, 64, False)


def test_without_attention_dp_there_is_one_rank() -> None:
    made = config(tensor_parallel_size=4)

    assert (made.rank_count, made.block_tokens, made.has_stats) == (1, 32, True)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"max_batch_size": 8}, "give it by --max-batch-size"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 0.5}}, "--kv-cache-free-gpu-memory-fraction"),
        ({"kv_cache_config": 7}, "kv_cache_config"),
        ({"enable_chunked_prefill": False}, "moved request"),
        ({"max_beam_width": 4}, "beams"),
        ({"num_postprocess_workers": 2}, "aborted"),
        ({"cache_transceiver_config": {}}, "prefill and decode"),
        ({"backend": "tensorrt"}, "PyTorch backend"),
        ({"batched_logits_processor": 1}, "every request"),
        ({"skip_tokenizer_init": True}, "tokeniser"),
    ],
)
def test_what_has_a_flag_and_what_nobody_may_change_is_refused(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        config(extra=extra)


def test_guided_and_speculative_decoding_together_are_refused() -> None:
    with pytest.raises(StartupError, match="do not go together"):
        config(guided_decoding_backend="xgrammar", extra={"speculative_config": {"decoding_type": "NGram"}})


def test_a_file_of_json_needs_no_library(tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text('{"enable_attention_dp": true}')

    assert read_extra(file) == {"enable_attention_dp": True}


def test_a_file_of_yaml_is_read_where_there_is_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").write_text("class YAMLError(Exception): pass\ndef safe_load(text): return {'read': text}")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "extra.yaml"
    file.write_text("enable_attention_dp: true")

    try:
        assert read_extra(file) == {"read": "enable_attention_dp: true"}
    finally:
        del sys.modules["yaml"]


@pytest.mark.parametrize(
    ("text", "why"), [("[1]", "names and values"), ("{", "cannot be read"), ('{"model": "x"}', "--model")]
)
def test_a_file_that_is_none_is_refused_with_a_sentence(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "extra.json"
    file.write_text(text)

    with pytest.raises(StartupError, match=why):
        read_extra(file)
    with pytest.raises(StartupError, match="cannot be read"):
        read_extra(tmp_path / "none")
