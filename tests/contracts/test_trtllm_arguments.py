"""Every name that we pass to TensorRT-LLM is in the manifest that is checked against the real package."""

from pathlib import Path
from typing import Any

from services.core.request import Guided, GuidedKind, Sampling
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments
from services.worker.engines.trtllm.sampling_params import ModelFacts, generate_arguments
from tests.contracts.manifest import CLASSES
from tests.support.doubles import make_request

FACTS = ModelFacts(context_length=100, vocab_size=300, end_ids=(256,), guided_backend="xgrammar")


def known(name: str) -> set[str]:
    return {field for used in CLASSES if used.name == name for field in used.fields}


def passed(**fields: Any) -> set[str]:
    return set(generate_arguments(make_request(**fields), FACTS).sampling)


def test_every_parameter_of_a_request_is_in_the_manifest() -> None:
    everything = passed(logprobs=1, min_tokens=2) | passed(sampling=Sampling(temperature=0.8), stop_token_ids=(5,))

    assert everything <= known("SamplingParams")
    assert {"guided_decoding", "embedding_bias"} <= known("SamplingParams")


def test_every_guided_field_is_in_the_manifest() -> None:
    guided = [generate_arguments(make_request(guided=Guided(kind, ("x",))), FACTS).guided or {} for kind in GuidedKind]

    assert {name for one in guided for name in one} == known("GuidedDecodingParams")


def test_every_argument_of_the_engine_is_in_the_manifest() -> None:
    config = TrtLlmConfig(model=Path("m"), served_model_name="m", guided_decoding_backend="xgrammar")
    arguments = llm_arguments(config, 100)

    assert set(arguments) <= known("TorchLlmArgs")
    assert set(arguments["kv_cache_config"]) <= known("KvCacheConfig")
