"""The subcommand itself: its options, and the conversation on the terminal."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from services.cli.chat.client import ChatConfig, ChatError, Conversation
from services.cli.options import Integer, Number, env_option
from services.runtime.loop import run_on_loop

PROMPT = "> "


def _check_url(_: click.Context, __: click.Parameter, given: str) -> str:
    url = urlsplit(given)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise click.BadParameter(f"{given!r} is not a URL such as http://127.0.0.1:8000")
    return f"{url.scheme}://{url.netloc}"


@click.command(short_help="Talk to a model in the terminal.")
@click.option(
    "--url",
    envvar="DYN_CHAT_URL",
    show_envvar=True,
    default="http://127.0.0.1:8000",
    callback=_check_url,
    help="URL of a frontend's HTTP API.",
)
@env_option("--model", "DYN_CHAT_MODEL", show_default="the first that is served", help="Name of the model.")
@env_option("--max-tokens", "DYN_CHAT_MAX_TOKENS", type=Integer(-1), help="Maximum length of an answer in tokens.")
@env_option("--temperature", "DYN_CHAT_TEMPERATURE", type=Number(0, 2), help="Sampling temperature.")
@env_option("--seed", "DYN_CHAT_SEED", type=Integer(-(2**63), 2**64 - 1), help="Seed of the sampling.")
@env_option(
    "--api-key",
    "DYN_CHAT_API_KEY",
    help="API key, if the server needs one. All users of the machine can see a command line; prefer the variable.",
)
@env_option(
    "--ca",
    "DYN_CHAT_CA",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file of the CA of the server's certificate. Default: those that the system trusts.",
)
@env_option("--system", "DYN_CHAT_SYSTEM", help="System message at the start of the conversation.")
def command(
    *, url: str, model: str | None, api_key: str | None, ca: Path | None, system: str | None, **options: Any
) -> None:
    """Talk to a model in the terminal.

    Ctrl-C stops an answer, Ctrl-D ends the conversation. Text from a pipe is sent as one message.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config = ChatConfig(url=url, model=model, api_key=api_key, ca=ca, system=system, options=given)
    conversation = Conversation(config)
    if sys.stdin.isatty():
        _converse(conversation)
    elif not _answer(conversation, _read_message()):
        sys.exit(1)


def _read_message() -> str:
    """All of standard input."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.ClickException("standard input is not valid UTF-8") from error
    if not text.strip():
        raise click.ClickException("standard input is empty: pipe a message in, or use a terminal")
    return text


def _converse(conversation: Conversation) -> None:
    if find_spec("readline") is not None:
        import readline  # noqa: F401 (gives `input` its line editing)
    _greet(conversation)
    while True:
        try:
            text = input(PROMPT)
        except KeyboardInterrupt:
            click.echo()
            continue
        except EOFError:
            click.echo()
            return
        if text.strip():
            _answer(conversation, text)


def _greet(conversation: Conversation) -> None:
    try:
        model = run_on_loop(conversation.find_model())
    except ChatError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"This is {model}. Ctrl-C stops an answer, Ctrl-D leaves.")


def _answer(conversation: Conversation, text: str) -> bool:
    """Print the answer as it arrives. Returns False if it failed."""
    has_begun = False

    def write(part: str) -> None:
        nonlocal has_begun
        has_begun = True
        sys.stdout.write(part)
        sys.stdout.flush()

    try:
        run_on_loop(conversation.ask(text, write))
    except KeyboardInterrupt:  # The runner has cancelled the request, which also ends it at the server.
        click.echo()
    except ChatError as error:
        if has_begun:
            click.echo()
        click.echo(f"error: {error}", err=True)
        return False
    click.echo()
    return True
