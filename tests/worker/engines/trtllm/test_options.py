"""The settings of TensorRT-LLM: all that requests depend on are passed, and none that would break them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from services.runtime.process import StartupError
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments, read_extra


def config(**given: Any) -> TrtLlmConfig:
    return TrtLlmConfig(model=Path("/models/m"), served_model_name="m", **given)


def test_every_setting_that_requests_depend_on_is_passed_explicitly() -> None:
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


def test_guided_decoding_loads_the_engines_own_tokenizer() -> None:
    arguments = llm_arguments(config(guided_decoding_backend="xgrammar"), 4096)

    assert (arguments["guided_decoding_backend"], arguments["skip_tokenizer_init"]) == ("xgrammar", False)


def test_settings_without_a_flag_come_from_the_file() -> None:
    extra = {
        "enable_attention_dp": True,
        "enable_iter_perf_stats": False,
        "kv_cache_config": {"tokens_per_block": 64},
    }
    options = config(extra=extra, tensor_parallel_size=4)

    arguments = llm_arguments(options, 4096)

    assert arguments["enable_attention_dp"] is True
    assert arguments["enable_iter_perf_stats"] is False
    assert arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.9, "tokens_per_block": 64}
    assert (options.rank_count, options.block_tokens, options.has_stats) == (4, 64, False)


def test_engine_without_attention_dp_has_one_rank() -> None:
    options = config(tensor_parallel_size=4)

    assert (options.rank_count, options.block_tokens, options.has_stats) == (1, 32, True)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"max_batch_size": 8}, "use --max-batch-size instead"),
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
def test_file_with_a_flags_or_the_workers_own_setting_is_refused(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        config(extra=extra)


def test_guided_with_speculative_decoding_is_refused() -> None:
    with pytest.raises(StartupError, match="cannot be combined"):
        config(guided_decoding_backend="xgrammar", extra={"speculative_config": {"decoding_type": "NGram"}})


def test_json_file_is_read_without_a_library(tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text('{"enable_attention_dp": true}')

    assert read_extra(file) == {"enable_attention_dp": True}


def test_yaml_file_is_read_if_the_library_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yaml.py").write_text("class YAMLError(Exception): pass\ndef safe_load(text): return {'read': text}")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "extra.yaml"
    file.write_text("enable_attention_dp: true")

    try:
        assert read_extra(file) == {"read": "enable_attention_dp: true"}
    finally:
        del sys.modules["yaml"]


@pytest.mark.parametrize(
    ("text", "why"), [("[1]", "names to values"), ("{", "cannot be read"), ('{"model": "x"}', "--model")]
)
def test_invalid_or_missing_file_is_refused_with_a_clear_message(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "extra.json"
    file.write_text(text)

    with pytest.raises(StartupError, match=why):
        read_extra(file)
    with pytest.raises(StartupError, match="cannot be read"):
        read_extra(tmp_path / "none")
