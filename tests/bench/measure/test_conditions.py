"""The conditions of a measurement name the machine and a command that can be typed again."""

import os
import sys

import pytest

from bench.measure.conditions import command, machine


def test_machine_has_its_cores_and_kernel() -> None:
    assert f"{os.cpu_count()} cores, Linux {os.uname().release}" in machine()


def test_command_is_quoted_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ignored", "--only", "two words"])

    assert command("bench.scale") == "python -m bench.scale --only 'two words'"
