"""The state folder belongs to one cluster at a time, and describes its processes while it runs."""

from pathlib import Path

import pytest

from services.cluster.state import owned, write_state
from services.runtime.process import StartupError


def test_state_folder_has_one_owner_and_no_stale_state(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{}")

    with owned(tmp_path):
        assert not (tmp_path / "cluster.json").exists()
        write_state(tmp_path, {"workers": []})
        with pytest.raises(StartupError, match="another cluster runs in"), owned(tmp_path):
            pass

    assert not (tmp_path / "cluster.json").exists()


def test_state_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StartupError, match="cannot use the state folder"), owned(tmp_path / "file"):
        pass
