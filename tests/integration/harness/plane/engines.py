"""The engines that the tests of a worker run on, each in real processes: the mocker, and TensorRT-LLM as we play it.

What a test asks of a worker it says in the mocker's options. Those that TensorRT-LLM has by another name are
translated; one that it has not, such as a fault, is a KeyError. Faults of the played package are variables of the
process: see tests/fakes/tensorrt_llm/_fake/faults.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tests.integration.harness.clients.requests import Request

FAKES = Path(__file__).parents[3] / "fakes"
MODEL = "mocker"
"""What clients ask for, of whichever engine."""
CONTEXT_LENGTH = 131_072
WORK_FILE = "TLLM_FAKE_WORK_FILE"
BATCH_SIZE = 1024
PACE = "--mocker-itl-ms="
PACE_DEFAULT = "6"
_NAMES = {"--mocker-prefill-chunk-tokens": "--max-num-tokens"}


class Engine(Protocol):
    """draws_move: whether a sampled answer goes on at another worker.

    steps_max: how many steps may still be made, or told of, for a request that ends once a test has looked: the one
    that was under way, one in which the engine hears of it, and one more where the next is prepared meanwhile.
    """

    @property
    def sampling_survives_moves(self) -> bool: ...

    @property
    def steps_max(self) -> int: ...

    def words(self, options: Sequence[str]) -> list[str]:
        """Of the worker's command line."""
        ...

    def environment(self, options: Sequence[str]) -> Mapping[str, str]:
        """What the worker's process has besides."""
        ...


class Mocker:
    """The options are its own."""

    sampling_survives_moves = True
    steps_max = 2

    def words(self, options: Sequence[str]) -> list[str]:
        return [*options]

    def environment(self, options: Sequence[str]) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True)
class TrtLlm:
    """folder: a model of bytes, so that prompts are as long as the mocker's."""

    folder: Path
    sampling_survives_moves = False
    steps_max = 3

    def words(self, options: Sequence[str]) -> list[str]:
        model = (f"--model={self.folder}", f"--served-model-name={MODEL}")
        size = (f"--context-length={CONTEXT_LENGTH}", f"--max-batch-size={BATCH_SIZE}")
        return ["--engine=trtllm", *model, *size, *(_translated(one) for one in options if not one.startswith(PACE))]

    def environment(self, options: Sequence[str]) -> Mapping[str, str]:
        paces = [one.removeprefix(PACE) for one in options if one.startswith(PACE)]
        return {"PYTHONPATH": str(FAKES), "TLLM_FAKE_STEP_MS": paces[-1] if paces else PACE_DEFAULT}


def _translated(option: str) -> str:
    name, _, value = option.partition("=")
    return f"{_NAMES[name]}={value}" if name.startswith("--mocker-") else option


def movable_requests(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """As they are; where draws do not move, without any, and with prompts that differ instead of seeds."""
    if engine.sampling_survives_moves:
        return [*requests]
    return [replace(request, temperature=0.0, prompt=f"{request.prompt} {request.seed}") for request in requests]
