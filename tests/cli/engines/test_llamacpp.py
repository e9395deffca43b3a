"""llamacpp options: a model that cannot be loaded is refused before the worker starts."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.worker import command


@pytest.mark.parametrize(
    ("options", "said"),
    [([], "--engine llamacpp needs --model"), (["--model=/no/such.gguf"], "there is no file /no/such.gguf")],
)
def test_missing_model_is_refused(options: list[str], said: str) -> None:
    done = CliRunner().invoke(command, ["--engine=llamacpp", *options])

    assert done.exit_code in (1, 2)
    assert said in done.output


def test_model_that_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("text")

    done = CliRunner().invoke(command, ["--engine=llamacpp", f"--model={tmp_path / 'model'}"])

    assert done.exit_code == 1
    assert "is not a GGUF file" in done.output
