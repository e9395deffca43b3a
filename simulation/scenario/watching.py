"""Looks at the calls of functions of the product, from outside."""

import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Watched:
    """A condition on the calls of one function.

    `place`: module and function. `when`: called with the outcome of each call, which may be an exception, and with its
    arguments. `before`: called before it instead, with None for the outcome.
    """

    name: str
    place: str
    when: Callable[..., bool]
    before: bool = False


_watched: list[tuple[Any, str, Any]] = []
"""What is watched: the owner of a function, its name, and the function."""


def watch(all_watched: Iterable[Watched], on_met: Callable[[str], object]) -> None:
    """Call `on_met` with the name of each condition when it is met, until `end_watching`."""
    by_place: dict[str, list[Watched]] = defaultdict(list)
    for one in all_watched:
        by_place[one.place].append(one)
    for place, watched in by_place.items():
        module_name, _, path = place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, name = path.split(".")
        for outer in classes:
            owner = getattr(owner, outer)
        function = getattr(owner, name)
        _watched.append((owner, name, function))
        setattr(owner, name, _wrapped(function, watched, on_met))


def end_watching() -> None:
    """Leave the product as it was before the first `watch`."""
    while _watched:
        setattr(*_watched.pop())


def _wrapped(function: Any, watched: list[Watched], on_met: Callable[[str], object]) -> Any:
    earlier = [one for one in watched if one.before]
    later = [one for one in watched if not one.before]

    def note(among: list[Watched], outcome: Any, arguments: tuple[Any, ...]) -> None:
        for one in among:
            if one.when(outcome, *arguments):
                on_met(one.name)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        note(earlier, None, arguments)
        try:
            outcome = function(*arguments, **named)
        except BaseException as error:
            note(later, error, arguments)
            raise
        note(later, outcome, arguments)
        return outcome

    @functools.wraps(function)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        note(earlier, None, arguments)
        try:
            outcome = await function(*arguments, **named)
        except BaseException as error:
            note(later, error, arguments)
            raise
        note(later, outcome, arguments)
        return outcome

    return call_async if inspect.iscoroutinefunction(function) else call
