"""Faults that are planted into the product: each still has its place there."""

import importlib.util
from pathlib import Path

import pytest

from simulation.planted import PLANTS, Plant


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_fault_replaces_one_piece_of_its_module(plant: Plant) -> None:
    spec = importlib.util.find_spec(plant.module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()

    assert source.count(plant.old) == 1
    compile(source.replace(plant.old, plant.new), spec.origin, "exec")


def test_there_are_twenty_and_each_has_its_name() -> None:
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 20
