"""A child process reports in lines of JSON, and its early end is an error of the bench."""

import pytest

from bench.measure.child_process import ChildProcess
from bench.measure.errors import BenchError


def test_lines_of_the_child_are_decoded() -> None:
    with ChildProcess("floor.bare_engine", 1, 2, 0.1) as child:
        assert child.receive() > 0


def test_child_that_ends_without_a_line_is_an_error_with_its_name() -> None:
    with (
        ChildProcess("measure.no_such_module") as child,
        pytest.raises(BenchError, match="no_such_module ended"),
    ):
        child.receive()
