"""What stands in groups of exceptions, however deep."""

from services.groups import leaf_of


def test_finds_the_first_exception_that_is_no_group() -> None:
    first, second = ValueError("first"), ValueError("second")

    assert leaf_of(ExceptionGroup("outer", [ExceptionGroup("inner", [first]), second])) is first


def test_an_exception_alone_is_itself() -> None:
    alone = ValueError("alone")

    assert leaf_of(alone) is alone
