"""The client: translates one request to one call of `generate_async`, with keyword arguments of its own."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind, Request, Sampling
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.installation import Installation
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.sampling_params import ModelFacts
from tests.support.doubles import make_request

FACTS = ModelFacts(context_length=100, vocab_size=4, end_ids=(3,), guided_backend="xgrammar")
GREEDY = Sampling(temperature=0.0)


@dataclass
class Llm:
    """Records the arguments of its constructor and of each request."""

    arguments: dict[str, Any]
    requests: list[dict[str, Any]] = field(default_factory=list)

    def generate_async(self, **arguments: Any) -> Any:
        self.requests.append(arguments)
        return "the result"


def client(llm: Any = lambda **arguments: Llm(arguments), **config: Any) -> Client:
    package = Installation(
        llm=llm,
        sampling_params=SimpleNamespace,
        guided_params=lambda **fields: fields,
        scheduling_params=lambda **fields: fields,
        request_error=KeyError,
    )
    package_with_lists = SimpleNamespace(**{name: getattr(package, name) for name in package.__slots__}, vector=list)
    return Client(package_with_lists, TrtLlmConfig(model=Path("m"), served_model_name="m", **config), FACTS)  # type: ignore[arg-type]


def started(request: Request, **config: Any) -> dict[str, Any]:
    """The arguments of `generate_async` for this request."""
    made = client(**config)
    assert made.start(request, rank=1) == "the result"
    [arguments] = made.llm.requests
    return dict(arguments)


def test_constructor_loads_the_model() -> None:
    assert client().llm.arguments["model"] == "m"


def test_model_that_cannot_be_loaded_is_engine_dead() -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(Failure, match="cannot load m: out of memory") as raised:
        client(refuse)

    assert raised.value.reason is Reason.ENGINE_DEAD


def test_request_streams_its_prompt_and_generated_tokens() -> None:
    arguments = started(make_request((1, 2), sampling=GREEDY).after([0]))

    assert (arguments["inputs"], arguments["streaming"]) == ([1, 2, 0], True)
    assert arguments["sampling_params"].top_k == 1
    assert arguments["scheduling_params"] is None


def test_each_request_gets_its_own_sampling_params() -> None:
    made = client()

    for _ in range(2):
        made.start(make_request(sampling=GREEDY))

    first, second = (arguments["sampling_params"] for arguments in made.llm.requests)
    assert first is not second


def test_guided_field_is_passed_as_guided_decoding_params() -> None:
    arguments = started(make_request(sampling=GREEDY, guided=Guided(GuidedKind.JSON_OBJECT)))

    assert arguments["sampling_params"].guided_decoding == {"json_object": True}


def test_logit_biases_are_summed_into_a_vector_over_the_vocabulary() -> None:
    biased = Sampling(temperature=0.0, logit_bias=((1, 2.0), (1, 0.5), (3, -1.0)))

    assert started(make_request(sampling=biased))["sampling_params"].embedding_bias == [0.0, 2.5, 0.0, -1.0]


def test_request_is_bound_to_its_rank_with_attention_dp() -> None:
    config = {"tensor_parallel_size": 2, "extra": {"enable_attention_dp": True}}

    arguments = started(make_request(sampling=GREEDY), **config)

    assert arguments["scheduling_params"] == {"attention_dp_rank": 1, "attention_dp_relax": False}


def test_value_that_the_engine_would_ignore_is_refused_before_the_call() -> None:
    made = client()

    with pytest.raises(Failure) as raised:
        made.start(make_request(sampling=Sampling(temperature=0.5, seed=1)))

    assert raised.value.reason is Reason.INVALID_ARGUMENT
    assert made.llm.requests == []
