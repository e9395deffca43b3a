"""Renders a conversation with a model's chat template. Templates come from workers, so they run in a sandbox."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.core.errors import QUOTED_CHARACTERS_MAX, invalid

TEMPLATES_KEPT = 64
_REASONING = {"<think>": "</think>", "<thought>": "</thought>", "<|channel>": "<channel|>"}

Turn = dict[str, Any]
"""A message as templates see it."""


class ChatTemplate:
    """A chat template with the special tokens of its model. Raises INVALID_ARGUMENT if it is no valid template.

    `literals`: the strings that it looks for in other strings, such as the contents of messages.
    `reasoning`: the begin and the end of reasoning in what an assistant says. Templates leave out its text up to the
    last end, because models expect no earlier reasoning in a prompt.
    `knows_developer`: whether it has the role `developer`.
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _environment()
        try:
            tree = environment.parse(source)
            strings = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
            self.literals = frozenset(_looked_for(tree, self._special))
            self.reasoning = {begin: end for begin, end in _REASONING.items() if end in source}
            self.knows_developer = "developer" in strings
            self._template = environment.from_string(tree)
        except Exception as error:  # The template is foreign code.
            raise _refusal(error) from error

    def render(self, turns: Sequence[Turn]) -> str:
        """Render the messages. Raises INVALID_ARGUMENT if the template refuses them.

        Templates get the same variables as in transformers' `apply_chat_template`. There are no tools and documents.
        """
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except MemoryError:  # The bound of a helper process, which reports it.
            raise
        except Exception as error:  # The template is foreign code: any exception means that it refuses the messages.
            raise _refusal(error) from error


@lru_cache(maxsize=TEMPLATES_KEPT)
def chat_template(source: str, bos_token: str, eos_token: str) -> ChatTemplate:
    """The compiled template. Raises INVALID_ARGUMENT."""
    return ChatTemplate(source, bos_token, eos_token)


def parsed(source: str) -> nodes.Template:
    """The tree of a template. Raises an exception if it is no valid template. Computes nothing."""
    return _environment().parse(source)


def _refusal(error: Exception) -> Exception:
    why = str(error)[:QUOTED_CHARACTERS_MAX]  # The exception may quote the messages.
    return invalid("messages", f"the model's chat template refuses the messages: {why}")


def _looked_for(tree: nodes.Template, special: Mapping[str, str]) -> Iterator[str]:
    """The strings in comparisons, and in the arguments of methods, filters and tests."""
    for place in _searched(tree):
        for found in (place, *place.find_all((nodes.Const, nodes.Name))):
            value = found.value if isinstance(found, nodes.Const) else special.get(getattr(found, "name", ""))
            if isinstance(value, str) and value.strip():
                yield value


def _searched(tree: nodes.Template) -> Iterator[nodes.Node]:
    for compare in tree.find_all(nodes.Compare):
        yield from (compare.expr, *compare.ops)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):  # A method; not a macro, or a function such as `raise_exception`.
            yield from (*call.args, *call.kwargs)
    for kind in (nodes.Filter, nodes.Test):
        for one in tree.find_all(kind):
            yield from (*one.args, *one.kwargs)


class _GenerationBlock(jinja2.ext.Extension):
    """Ignores `{% generation %}`, which marks the model's turns for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Leaves all computation to the rendering. Otherwise `{{ 9**9**9 }}` would be computed by the compiler."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if isinstance(node, (nodes.TemplateData, nodes.Const)):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write plain JSON: Jinja's own filter escapes for HTML, "<" as "\\u003c"."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
