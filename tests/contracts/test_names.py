"""TensorRT-LLM has every name that our worker uses: checked on the fake, and on the real package if it is installed.

The package is not imported, because that needs its native libraries.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.contracts.manifest import CLASSES, EXPORTS, VERSION, ClassUse
from tests.contracts.reading import exported, missing_from

FAKE = Path(__file__).resolve().parent.parent / "fakes" / "tensorrt_llm"


def installed() -> Path | None:
    """The folder of the real package, if there is one."""
    spec = importlib.util.find_spec("tensorrt_llm")
    folders = [] if spec is None else [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if folder != FAKE), None)


@pytest.fixture(params=["fake", "installed"])
def package(request: pytest.FixtureRequest) -> Path:
    folder = FAKE if request.param == "fake" else installed()
    if folder is None:
        pytest.skip("TensorRT-LLM is not installed here, so its names were not checked")
    return folder


def test_all_classes_have_the_names_in_the_manifest(package: Path) -> None:
    assert [name for use in CLASSES for name in missing_from(package, use)] == []


def test_packages_export_the_names_in_the_manifest(package: Path) -> None:
    missing = {module: set(names) - exported(package / module) for module, names in EXPORTS.items()}

    assert not any(missing.values()), missing


def test_version_is_the_one_in_the_manifest(package: Path) -> None:
    assert f'__version__ = "{VERSION}"' in (package / "version.py").read_text()


def test_missing_names_are_found() -> None:
    use = ClassUse(
        module="executor/result.py",
        name="GenerationResult",
        fields=("token_ids",),
        methods=("aresult", "pause"),
        coroutines=("abort",),
        calls=(("result", ("timeout", "deadline")),),
    )
    where = "executor/result.py: GenerationResult"

    assert missing_from(FAKE, use) == [
        f"{where}.token_ids",
        f"def {where}.aresult",
        f"def {where}.pause",
        f"async def {where}.abort",
        f"{where}.result(deadline=)",
    ]
    assert missing_from(FAKE, ClassUse(module="llmapi/llm.py", name="VideoLLM")) == ["llmapi/llm.py: VideoLLM"]
    assert missing_from(FAKE, ClassUse(module="grpc.py", name="LLM")) == ["grpc.py: LLM"]


def test_names_may_come_from_a_base_class_in_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text(
        "class Base:\n    a: int\n    def f(self): self.b = 1\nclass Args(Base):\n    c: int"
    )

    assert missing_from(tmp_path, ClassUse(module="args.py", name="Args", fields=("a", "b", "c"), methods=("f",))) == []
