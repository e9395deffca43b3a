"""Finds the package `tensorrt_llm`: whether it is there, whether we know this version, and the names we use of it.

It is looked for without being imported, because to import any part of it loads all of its native libraries, and those
of another version may do anything.
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
    """What the engine uses. request_error: one request failed, and the engine goes on."""

    llm: Any
    sampling_params: Any
    guided_params: Any
    scheduling_params: Any
    request_error: type[Exception]

    def vector(self, values: Sequence[float]) -> Any:
        """As the engine takes it: torch comes with it."""
        torch = importlib.import_module("torch")
        return torch.tensor(values, dtype=torch.float32)


def load_package() -> Installation:
    """Import it, with some seconds of work and a banner on standard output. Raises StartupError."""
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
    """Whether it is there, in a version that was tested. Imports nothing. Raises StartupError."""
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(f"--engine trtllm needs TensorRT-LLM, which is not installed here: {HOW_TO_GET}")
    check_version(_version_in(Path(spec.submodule_search_locations[0])))


def check_version(version: str | None) -> None:
    """Raises StartupError for one that was not tested; None: it does not say."""
    if version is None or not TESTED.fullmatch(version):
        raise StartupError(
            f"this worker knows TensorRT-LLM {TESTED_NAME}, and {version or 'an unknown version'} is installed, whose"
            f" traps may be others: {HOW_TO_GET}"
        )


def _version_in(folder: Path) -> str | None:
    """What version.py assigns to `__version__`."""
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
