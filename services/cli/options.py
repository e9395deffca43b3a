"""Options and types that several subcommands share."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from services.runtime.address import split_address, split_addresses

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~:\[\]-]{1,255}")
"""The form in which browsers send it: lower case, with the port unless it is the scheme's default."""
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
