"""The installation check: if TensorRT-LLM is missing, broken or untested, one sentence says what to do."""

import sys
from pathlib import Path

import pytest

from services.runtime.process import StartupError
from services.worker.engines.trtllm.installation import check_package, check_version, load_package


@pytest.mark.parametrize("version", ["1.2.0", "1.2.1", "1.2.10", "1.2.1.post1"])
def test_tested_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["1.1.0", "1.3.0", "1.3.0rc29", "1.2.0rc6", "1.20.1", "0.21.0", "2.0.0", "", None])
def test_untested_version_is_refused(version: str | None) -> None:
    with pytest.raises(StartupError, match=r"supports TensorRT-LLM 1\.2, and .* is installed"):
        check_version(version)


def write_package(folder: Path, version_file: str, init: str) -> None:
    (folder / "tensorrt_llm").mkdir()
    (folder / "tensorrt_llm" / "version.py").write_text(version_file)
    (folder / "tensorrt_llm" / "__init__.py").write_text(init)


@pytest.mark.parametrize("version_file", ['__version__ = "1.3.0"', "", "not Python"])
def test_untested_version_is_refused_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_file: str
) -> None:
    write_package(tmp_path, version_file, "raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(StartupError, match="is installed"):
        check_package()


def test_missing_package_is_reported_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("fakes")])

    with pytest.raises(StartupError, match=r"not installed here: .*nvcr\.io/nvidia/tensorrt-llm/release:1\.2\.1"):
        check_package()


@pytest.mark.parametrize("error", ["ImportError('libpython3.12.so.1.0')", "OSError('libcuda.so.1')"])
def test_missing_native_libraries_are_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    write_package(tmp_path, '__version__ = "1.2.1"', f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(StartupError, match=r"cannot be loaded: lib.*; it needs a GPU .* libpython"):
        load_package()


def test_package_provides_every_name_that_is_used() -> None:
    package = load_package()

    assert issubclass(package.request_error, Exception)
    assert package.vector([0.5, 1.0]).tolist() == [0.5, 1.0]
