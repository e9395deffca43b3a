"""`unbroken models`: lists the models that can be pulled, and reports a failed download in one line."""

import pytest
from click.testing import CliRunner

from services.cli import models
from services.models.download import PUBLISHED
from services.runtime.process import StartupError


def test_unknown_model_is_refused_with_the_known_names() -> None:
    done = CliRunner().invoke(models.command, ["pull", "nothing"])

    assert done.exit_code == 2
    assert all(name in done.output for name in PUBLISHED)


def test_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StartupError("pip cannot reach its index")

    monkeypatch.setattr(models, "pull", fail)

    done = CliRunner().invoke(models.command, ["pull", "smollm2"])

    assert (done.exit_code, done.output) == (1, "Error: pip cannot reach its index\n")
