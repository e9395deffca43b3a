"""The cache folder follows the XDG specification, and its absence is explained."""

from pathlib import Path

import pytest

from services.runtime.folders.cache import user_cache
from services.runtime.process import StartupError


def test_folder_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")

    assert user_cache() == Path("/home/me/.cache/unbroken")


def test_variable_names_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")

    assert user_cache() == Path("/cache/unbroken")


def test_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(StartupError, match="has no home folder: set XDG_CACHE_HOME"):
        user_cache()
