"""What stands in groups of exceptions: a TaskGroup wraps whatever ended it, and groups can stand in groups."""


def leaf_of(error: BaseException) -> BaseException:
    """The first exception in it that is no group; the error itself if it is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
