"""Options and types that several subcommands share."""

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from services.core.errors import quoted
from services.runtime.address import split_address, split_addresses

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~:\[\]-]{1,255}")
"""The form in which browsers send it: lower case, with the port unless it is the scheme's default."""
DAY_S = 86_400
DAY_MS = DAY_S * 1000
MIB = 1024 * 1024
INTEGER_MAX = 2**31 - 1
"""Fits the fields of the wire protocol and the engines' own integers."""
Function = TypeVar("Function", bound=Callable[..., Any])


class Address(click.ParamType[str]):
    """`host:port`."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            split_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Integer(click.IntRange):
    """A whole number, always with bounds that the program can work with."""

    def __init__(self, least: int, most: int = INTEGER_MAX) -> None:
        super().__init__(least, most)
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except (ValueError, OverflowError):
            number = None
        if number is None or not self.least <= number <= self.most:
            self.fail(f"{quoted(str(value))} is not a whole number from {self.least} to {self.most}", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number, always with bounds that the program can work with. `above`: `least` itself is too small."""

    def __init__(self, least: float, most: float, *, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        is_enough = number > self.least if self.min_open else number >= self.least
        if not (is_enough and number <= self.most):  # Every comparison with NaN is false.
            word = "above" if self.min_open else "from"
            bounds = f"{word} {self.least:.10g} to {self.most:.10g}"
            self.fail(f"{quoted(str(value))} is not a number {bounds}", param, ctx)
        return number


class Addresses(click.ParamType[Sequence[str]]):
    """`host:port[,host:port…]` as a sequence of addresses."""

    name = "host:port,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[str]:
        if not isinstance(value, str):
            return list(value)
        try:
            return split_addresses(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Origins(click.ParamType[Sequence[str]]):
    """`scheme://host[:port][,…]`, or `*`, as a sequence."""

    name = "origin,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[str]:
        if not isinstance(value, str):
            return list(value)
        origins = [part.strip() for part in value.split(",")]
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                self.fail(f"{origin!r} is not an origin: write https://chat.example, or * for all", param, ctx)
        return origins


def refuse_empty(*variables: str) -> None:
    """Raises UsageError if one is set to nothing: click treats it as unset, which would leave something open."""
    for variable in variables:
        if os.environ.get(variable) == "":
            raise click.UsageError(f"{variable} is empty: give it a value, or unset it")


def combined(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A decorator that adds several options, which `--help` shows in this order."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def logging_options(function: Function) -> Function:
    """Adds `--log-level` and `--log-format`, which are passed to `start_logging`."""
    function = click.option(
        "--log-level",
        envvar="DYN_LOG_LEVEL",
        show_envvar=True,
        default="info",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Lowest level of messages that are logged.",
    )(function)
    return click.option(
        "--log-format",
        envvar="DYN_LOG_FORMAT",
        show_envvar=True,
        default="text",
        type=click.Choice(["text", "json"]),
        help="Format of log lines on stderr.",
    )(function)


def registry_option(function: Function) -> Function:
    """Adds `--registry`, the addresses of the registries."""
    return click.option(
        "--registry",
        "registries",
        envvar="DYN_REGISTRY",
        show_envvar=True,
        default="127.0.0.1:50050",
        type=Addresses(),
        help="Addresses of the registries. One that answers is used.",
    )(function)


def env_option(name: str, variable: str, **attributes: Any) -> Callable[[Function], Function]:
    """An option that can also be set by an environment variable, which `--help` shows."""
    return click.option(name, envvar=variable, show_envvar=True, **attributes)
