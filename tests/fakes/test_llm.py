"""The fake's LLM: the arguments that it accepts and refuses, and the files that it reads from a model folder."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.support import END_ID, PROMPT, answer, engine, greedy, start
from tests.fakes.tensorrt_llm import LLM, KvCacheConfig, SamplingParams, __version__
from tests.fakes.tensorrt_llm.llmapi import RequestError
from tests.support.doubles import run_async
from tests.support.model_folder import make_model_folder


def test_version_is_supported_by_the_worker() -> None:
    assert __version__ == "1.2.1"


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="got invalid argument: trace_headers"):
        LLM("bytes", trace_headers={})


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_batch_size": 0},
        {"guided_decoding_backend": "outlines"},
        {"guided_decoding_backend": "xgrammar", "skip_tokenizer_init": True},
        {"kv_cache_config": {"gpu_memory_fraction": 0.5}},
    ],
    ids=str,
)
def test_invalid_argument_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        LLM("bytes", **arguments)


def test_configuration_may_be_given_as_a_dict() -> None:
    with engine(kv_cache_config={"free_gpu_memory_fraction": 0.5}) as llm:
        assert llm.args.kv_cache_config == KvCacheConfig(free_gpu_memory_fraction=0.5)


def test_length_that_was_not_given_stays_unknown_to_the_caller() -> None:
    with engine() as llm:
        assert llm.args.max_seq_len is None


def test_request_without_a_tokenizer_must_have_an_end_id() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(ValueError, match="end_id"):
            start(llm, params=SamplingParams())
        assert (await start(llm, params=greedy(detokenize=True, max_tokens=3))).outputs[0].text == ""

    with engine(skip_tokenizer_init=True) as llm:
        run_async(play(llm))


def test_long_prompt_is_refused_at_once_without_chunked_prefill() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(ValueError, match="exceeds max_num_tokens"):
            start(llm)

    async def play_chunked(llm: Any) -> None:
        assert len(await answer(llm, max_tokens=3)) == 3

    with engine(max_num_tokens=8) as llm:
        run_async(play(llm))
    with engine(max_num_tokens=8, enable_chunked_prefill=True) as llm:
        run_async(play_chunked(llm))


def test_prompt_beyond_the_context_fails_only_in_the_engine() -> None:
    async def play(llm: Any) -> None:
        result = start(llm)
        with pytest.raises(RequestError):
            await result

    with engine(max_seq_len=8) as llm:
        run_async(play(llm))


def test_prompt_may_have_several_formats_and_is_never_empty() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=5)
        for inputs in (bytes(PROMPT).decode(), {"prompt_token_ids": PROMPT}, {"prompt": bytes(PROMPT).decode()}):
            result = await llm.generate_async(inputs=inputs, sampling_params=greedy(max_tokens=5))
            assert result.outputs[0].token_ids == whole
        with pytest.raises(IndexError):
            start(llm, [])
        with pytest.raises(TypeError):
            llm.generate_async(inputs=tuple(PROMPT))

    with engine() as llm:
        run_async(play(llm))


def test_unsupported_parameter_of_the_fake_is_refused() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(NotImplementedError, match="use_beam_search"):
            start(llm, use_beam_search=True)
        with pytest.raises(NotImplementedError):
            llm.generate_async(inputs=PROMPT, lora_request=object())

    with engine() as llm:
        run_async(play(llm))


def test_vocabulary_end_ids_and_context_come_from_the_model_folder(tmp_path: Path) -> None:
    generation = {"eos_token_id": [END_ID, 10]}
    folder = make_model_folder(tmp_path, {"generation_config.json": generation}, context_length=60)

    async def play(llm: Any) -> None:
        params = SamplingParams(max_tokens=None, top_k=1, ignore_eos=True)
        result = await start(llm, params=params)

        assert params.end_id == END_ID
        assert len(result.outputs[0].token_ids) == 60 - len(PROMPT)
        assert result.outputs[0].text.isascii()

    with LLM(str(folder)) as llm:
        run_async(play(llm))
