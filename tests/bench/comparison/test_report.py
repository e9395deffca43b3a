"""The report has a line for each figure of each row, and names what is missing."""

from dataclasses import replace

from bench.comparison.report import PARTS, Part, document, table
from bench.comparison.rounds import MACHINE, OURS, PEER, SMG, Round

PART = Part("http", "HTTP", "", "streams", (OURS, PEER), {"cpu": "CPU", "wait": "wait, ms"}, (PEER,))


def measured(ours: float, other: float | None = None) -> Round:
    one = Round()
    one.add("http", 16, OURS, {"cpu": ours, "wait": 2 * ours})
    if other is not None:
        one.add("http", 16, PEER, {"cpu": other, "wait": other})
    return one


def test_each_figure_has_a_line_per_row_with_both_systems_and_their_ratio() -> None:
    lines = table(PART, [measured(10, 20), measured(20, 40), measured(30, 60)]).splitlines()

    assert lines == [
        "| figure | streams | Unbroken | Dynamo | ÷ Dynamo |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| CPU | 16 | 20 (10 to 30) | 40 (20 to 60) | 0.5 |",
        "| wait, ms | 16 | 40 (20 to 60) | 40 (20 to 60) | 1 |",
    ]


def test_peers_column_is_empty_without_the_peer() -> None:
    assert "| CPU | 16 | 10 | — | — |" in table(PART, [measured(10)])


def test_first_system_is_divided_by_each_that_the_part_names() -> None:
    one = measured(10, 20)
    one.add("http", 16, SMG, {"cpu": 40})
    part = replace(PART, systems=(OURS, PEER, SMG), others=(PEER, SMG))

    assert "| CPU | 16 | 10 | 20 | 40 | 0.5 | 0.25 |" in table(part, [one])


def test_part_with_one_system_has_no_ratio() -> None:
    one = Round()
    one.add("floor", 16, MACHINE, {"send_us": 4.0})

    assert "| bare send, CPU µs per event | 16 | 4 |" in document([one], {}, []).splitlines()


def test_page_states_what_was_measured_where_and_what_failed() -> None:
    page = document([measured(10)], {"machine": "a machine"}, ["round 1, losses, Dynamo: it did not start"])

    assert "- machine: a machine" in page
    assert "## What failed\n\n- round 1, losses, Dynamo: it did not start" in page


def test_part_that_was_not_measured_has_no_table() -> None:
    page = document([measured(10)], {}, [])

    assert [part.title for part in PARTS if f"## {part.title}\n" in page] == ["OpenAI streams over HTTP"]
    assert "What failed" not in page
