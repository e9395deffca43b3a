"""What we pass to TensorRT-LLM is in the list of names that the real package is held to: see tests/contracts."""

from pathlib import Path
from typing import Any

from services.core.request import Guided, GuidedKind
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments
from services.worker.engines.trtllm.sampling_params import ModelFacts, generate_arguments
from tests.contracts.manifest import CLASSES
from tests.support.doubles import make_request
from tests.worker.engines.trtllm.support import SAMPLED

FACTS = ModelFacts(context_length=100, vocab_size=300, end_ids=(256,), guided_backend="xgrammar")


def known(name: str) -> set[str]:
    return {field for used in CLASSES if used.name == name for field in used.fields}


def passed(**fields: Any) -> set[str]:
    return set(generate_arguments(make_request(**fields), FACTS).sampling)


def test_every_parameter_of_a_request_is_on_the_list() -> None:
    everything = passed(logprobs=1, min_tokens=2) | passed(sampling=SAMPLED, stop_token_ids=(5,))

    assert everything <= known("SamplingParams")
    assert {"guided_decoding", "embedding_bias"} <= known("SamplingParams")


def test_every_kind_of_form_is_on_the_list() -> None:
    asked = [generate_arguments(make_request(guided=Guided(kind, ("x",))), FACTS).guided or {} for kind in GuidedKind]

    assert {name for one in asked for name in one} == known("GuidedDecodingParams")


def test_every_argument_of_the_engine_is_on_the_list() -> None:
    config = TrtLlmConfig(model=Path("m"), served_model_name="m", guided_decoding_backend="xgrammar")
    arguments = llm_arguments(config, 100)

    assert set(arguments) <= known("TorchLlmArgs")
    assert set(arguments["kv_cache_config"]) <= known("KvCacheConfig")
