"""Finds the package `tensorrt_llm`, checks that its version is one that was tested, and imports the names we use.

The check does not import the package: importing any part of it loads all of its native libraries, and those of an
untested version may do anything.
"""

import ast
import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.process import StartupError

TESTED = re.compile(r"1\.2\.\d+(\.post\d+)?")
TESTED_NAME = "1.2"
HOW_TO_GET = (
    "run the worker in NVIDIA's container nvcr.io/nvidia/tensorrt-llm/release:1.2.1, or install tensorrt-llm 1.2.1 from"
    " NVIDIA's own package index (that of PyPI is empty); see docs/gpus.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The names of TensorRT-LLM that the engine uses. `request_error`: one request failed, and the engine continues."""

    llm: Any
    sampling_params: Any
    guided_params: Any
    scheduling_params: Any
    request_error: type[Exception]

    def vector(self, values: Sequence[float]) -> Any:
        """A tensor as the engine expects it. torch is a dependency of TensorRT-LLM."""
        torch = importlib.import_module("torch")
        return torch.tensor(values, dtype=torch.float32)


def load_package() -> Installation:
    """Import the package, which takes seconds and prints a banner. Raises StartupError."""
    check_package()
    try:
        root = importlib.import_module("tensorrt_llm")
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        scheduling = importlib.import_module("tensorrt_llm.scheduling_params")
        errors = importlib.import_module("tensorrt_llm.executor.utils")
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(
            f"TensorRT-LLM cannot be loaded: {error}; it needs a GPU with its driver, the shared libpython and MPI:"
            f" {HOW_TO_GET}"
        ) from error
    return Installation(
        llm=root.LLM,
        sampling_params=root.SamplingParams,
        guided_params=llmapi.GuidedDecodingParams,
        scheduling_params=scheduling.SchedulingParams,
        request_error=errors.RequestError,
    )


def check_package() -> None:
    """Raise StartupError unless the package is installed in a tested version. Imports nothing."""
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(f"--engine trtllm needs TensorRT-LLM, which is not installed here: {HOW_TO_GET}")
    check_version(_version_in(Path(spec.submodule_search_locations[0])))


def check_version(version: str | None) -> None:
    """Raise StartupError if `version` was not tested; None: the package does not say its version."""
    if version is None or not TESTED.fullmatch(version):
        raise StartupError(
            f"this worker supports TensorRT-LLM {TESTED_NAME}, and {version or 'an unknown version'} is installed,"
            f" which was not tested: {HOW_TO_GET}"
        )


def _version_in(folder: Path) -> str | None:
    """The value that version.py assigns to `__version__`."""
    try:
        tree = ast.parse((folder / "version.py").read_text())
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "__version__" in names:
                return str(node.value.value)
    return None
