"""The engines that worker tests run on, each in real processes: the mocker, and TensorRT-LLM over a fake of its
package.

Tests give a worker the mocker's options. Those that TensorRT-LLM has under another name are translated; an option that
it does not have, such as a fault, raises KeyError. Faults of the fake package are environment variables of the process:
see tests/fakes/tensorrt_llm/_fake/faults.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tests.integration.harness.clients.requests import Request

FAKES = Path(__file__).parents[3] / "fakes"
MODEL = "mocker"
"""The model that clients request, whichever engine serves it."""
CONTEXT_LENGTH = 131_072
WORK_FILE = "TLLM_FAKE_WORK_FILE"
BATCH_SIZE = 1024
PACE = "--mocker-itl-ms="
PACE_DEFAULT = "6"
_NAMES = {"--mocker-prefill-chunk-tokens": "--max-num-tokens"}


class Engine(Protocol):
    """What tests need to know about an engine.

    `sampling_survives_moves`: whether a sampled answer continues at another worker. `steps_max`: how many more steps
    the engine may make or report for a request that is cancelled: the current step, the step in which the engine learns
    of it, and one more if the engine prepares the next step in advance.
    """

    @property
    def sampling_survives_moves(self) -> bool: ...

    @property
    def steps_max(self) -> int: ...

    def arguments(self, options: Sequence[str]) -> list[str]:
        """Return the worker's command line arguments for these options."""
        ...

    def environment(self, options: Sequence[str]) -> Mapping[str, str]:
        """Return further environment variables of the worker's process."""
        ...


class Mocker:
    """The mocker takes the options as they are."""

    sampling_survives_moves = True
    steps_max = 2

    def arguments(self, options: Sequence[str]) -> list[str]:
        return [*options]

    def environment(self, options: Sequence[str]) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True)
class TrtLlm:
    """TensorRT-LLM over its fake. `folder`: a model of bytes, so that prompts have as many tokens as the mocker's."""

    folder: Path
    sampling_survives_moves = False
    steps_max = 3

    def arguments(self, options: Sequence[str]) -> list[str]:
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
    """Return requests that can move: greedy ones with distinct prompts, if sampling does not survive moves."""
    if engine.sampling_survives_moves:
        return [*requests]
    return [replace(request, temperature=0.0, prompt=f"{request.prompt} {request.seed}") for request in requests]
