"""Every cost of the scale command can be measured. Tests use the smallest sizes, and time nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.growth import frontend
from bench.growth.curve import Curve
from bench.scale import curves, document, main, measure
from services.frontend.session.reader import STREAMS_AT_ONCE_MAX
from tests.support.doubles import run_async

SIZE = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "OPERATIONS", 10)


@pytest.mark.parametrize("curve", [one for one in curves() if "etcd" not in one.name], ids=lambda one: one.name)
def test_every_cost_can_be_measured(curve: Curve) -> None:
    costs = run_async(measure(replace(curve, sizes=(1, SIZE, 10 * SIZE)), repeats=2, size_max=SIZE))

    assert set(costs) == {1, SIZE}


def test_delivery_to_very_many_streams_is_measured_to_the_last_token() -> None:
    """Regression: a session delivers them over several turns of the loop, and they once counted as lost."""
    assert len(run_async(frontend.tokens(STREAMS_AT_ONCE_MAX + 1, 1))) == 1


def test_unknown_curve_name_is_refused_with_the_known_names(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--only=nonsense", f"--results={tmp_path}"])

    assert done.exit_code == 2
    assert all(curve.name in done.output for curve in curves())
    assert not list(tmp_path.iterdir())


def test_page_states_how_its_figures_were_measured() -> None:
    text = document({}, {"machine": "a small one"})

    assert "- machine: a small one" in text
