"""Runs every test of the engine on the fake TensorRT-LLM: see tests/fakes/tensorrt_llm."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_folder import make_model_folder

FAKES = Path(__file__).parents[3] / "fakes"
NAMES = ("tensorrt_llm", "torch", "xgrammar")


@pytest.fixture(autouse=True)
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the fake package importable during a test, with steps of 0.5 ms."""
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(FAKES))  # For the processes that try guided requests.
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "0.5")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose tokens are bytes."""
    return make_model_folder(tmp_path_factory.mktemp("model"), context_length=1024)
