"""Renders a conversation with a model's chat template. Templates come from workers, so they run in a sandbox."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.core.errors import QUOTED_CHARACTERS_MAX, invalid
from services.core.model_card import ModelCard
from services.core.request import Message

TEMPLATES_KEPT = 64


def render_chat(card: ModelCard, messages: tuple[Message, ...]) -> str:
    """Render the messages. Templates get the same variables as in transformers' `apply_chat_template`.

    There are no tools and no documents. Raises INVALID_ARGUMENT if the model has no template, or the template refuses
    the messages.
    """
    if not card.chat_template:
        raise invalid("messages", f"{card.model!r} has no chat template: use /v1/completions, or text")
    try:
        return _template(card.chat_template).render(
            messages=[_turn(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            bos_token=card.bos_token,
            eos_token=card.eos_token,
        )
    except Exception as error:  # The template is foreign code: any exception means that it refuses the messages.
        why = str(error)[:QUOTED_CHARACTERS_MAX]  # The exception may quote the messages.
        raise invalid("messages", f"the model's chat template refuses the messages: {why}") from error


def _turn(message: Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return {**turn, "name": message.name} if message.name else turn


class _GenerationBlock(jinja2.ext.Extension):
    """Ignores `{% generation %}`, which marks the model's turns for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=TEMPLATES_KEPT)
def _template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write plain JSON: Jinja's own filter escapes for HTML, "<" as "\\u003c"."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
