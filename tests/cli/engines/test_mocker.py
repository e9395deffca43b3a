"""Mocker options reach the engine, and every fault of it can be set and is explained."""

from dataclasses import fields

import pytest
from click.testing import CliRunner

from services.cli.engines.mocker import FAULTS, mocker_engine
from services.cli.worker import command
from services.worker.engines.mocker import Faults


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "mocker"),
        (["--model=llama"], "llama"),
        (["--served-model-name=chat"], "chat"),
        (["--model=llama", "--served-model-name=chat"], "chat"),
    ],
)
def test_served_name_is_the_given_one_the_models_or_that_of_the_engine(options: list[str], name: str) -> None:
    engine = mocker_engine(command.make_context("worker", options).params)

    assert engine.card.model == name


def test_mute_rank_that_does_not_exist_is_refused() -> None:
    """It would have no effect, without a message."""
    done = CliRunner().invoke(command, ["--mocker-dp-ranks=2", "--mocker-fault=mute_rank=2"])

    assert done.exit_code == 2
    assert "mute_rank=2: --mocker-dp-ranks gives no such rank" in done.output


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(command, ["--mocker-fault=fall_asleep=1"])

    assert done.exit_code == 2
    assert "'fall_asleep=1' is not one of die_after=N" in done.output


def test_help_explains_every_fault() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=10_000).output

    assert set(FAULTS) == {field.name for field in fields(Faults)}
    assert all(f"{name}={meaning}" in shown for name, meaning in FAULTS.items())
