"""template_inside: the usual templates render inside; whatever may take long, or is not known, does not."""

import pytest

from services.models.chat_template import _environment, chat_template
from services.models.template_inside import (
    _GLOBALS,
    LOOPS_NESTED_MAX,
    SOURCE_CHARACTERS_MAX,
    renders_inside,
)
from tests.models.support import BOS, EOS, TEMPLATES

EACH, END = "{% for m in messages %}", "{% endfor %}"
RANGE = "{% for i in range(99999) %}x{% endfor %}"
FALSE = "{% set ns = namespace(x=false) %}"
WITH_TOOLS = "{% if tools %}" + RANGE + "{% endif %}{% for t in m.tool_calls %}{{ t | tojson(indent=4) }}{% endfor %}"

HOSTILE = {
    "range": RANGE,
    "range by another name": "{% set r = range %}{% for i in r(99999) %}x{% endfor %}",
    "loops over characters": "{% for a in messages[0].content %}" * 2 + "x" + END * 2,
    "loops over messages": EACH * (LOOPS_NESTED_MAX + 1) + "x" + END * (LOOPS_NESTED_MAX + 1),
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "recursive macro": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f(messages[0].content) }}",
    "doubling": "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 60,
    "doubling in turns": "{% set ns = namespace(a='x') %}" + EACH + "{% set ns.a = ns.a ~ ns.a %}" + END,
    "growing in turns": "{% set ns = namespace(a='') %}" + EACH + "{% set ns.a = ns.a ~ messages[0].content %}" + END,
    "growing list": "{% set ns = namespace(a=[]) %}" + EACH + "{% set ns.a = ns.a + [1] + ns.a %}" + END,
    "notation of lists": "{% set a = messages[0].content %}" + "{% set a = [a] ~ '' %}" * 30,
    "replacing": "{% set a = 'aaaaaaaaaa' %}" + "{% set a = a | replace('a', 'aaaaaaaaaa') %}" * 12,
    "replacing by a text": "{{ messages[0].content.replace('a', messages[1].content) }}",
    "joining by a text": "{{ messages[0].content | join(d=messages[1].content) }}",
    "first message in each turn": EACH + "{{ messages[0].content }}" * 40 + END,
    "power": "{{ 9**9**9**9 }}",
    "product": "{{ messages[0].content * 1000000 }}",
    "width by %": "{{ '%999999999d' % 1 }}",
    "width by % of a client's": "{{ messages[0].content % 1 }}",
    "width by format": "{{ '{:>999999999}'.format(1) }}",
    "width by a filter": "{{ messages[0].content | center(999999999) }}",
    "width by map": "{{ messages | map('center', 999999999) | list }}",
    "width of a date": "{{ strftime_now('%999999999d') }}",
    "width of a date in a variable": "{% set f = '%999999999d' %}{{ strftime_now(f) }}",
    "width of JSON": "{{ messages[0] | tojson(indent=99999999) }}",
    "method by another name": "{% set raise_exception = 'a'.center %}{{ raise_exception(999999999) }}",
    "method for namespace": "{% set namespace = 'a'.center %}{% set x = namespace(width=9) %}",
    "namespace as the variable of a loop": FALSE + "{% for ns in messages %}{{ ns.content }}{% endfor %}",
    "block": "{% set a %}a{% endset %}",
    "filter block": "{% filter center(999) %}a{% endfilter %}",
    "long": "x" * (SOURCE_CHARACTERS_MAX + 1),
    "deep": "{% if messages %}" * 500 + "x" + "{% endif %}" * 500,
    "no template": "{% if %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_usual_template_renders_inside(name: str) -> None:
    assert renders_inside(TEMPLATES[name], BOS, EOS)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_does_not_render_inside(name: str) -> None:
    assert not renders_inside(HOSTILE[name], BOS, EOS)


def test_what_runs_only_with_tools_is_not_counted() -> None:
    assert renders_inside(EACH + WITH_TOOLS + END, BOS, EOS)


@pytest.mark.parametrize(
    "condition",
    [
        "add_generation_prompt",
        "messages",
        "range",
        "not tools",
        "tools or true",
        "tools is none",
        "tools | default(true, true)",
        "1 if tools else 2",
        "namespace",
    ],
)
def test_what_may_run_is_counted(condition: str) -> None:
    assert not renders_inside("{% if " + condition + " %}" + RANGE + "{% endif %}", BOS, EOS)


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}{% else %}" + RANGE + "{% endif %}",
        "{% if tools %}{% elif messages %}" + RANGE + "{% endif %}",
        "{% for t in tools %}{% else %}" + RANGE + END,
        "{% set x = false %}{% if messages %}{% set x = true %}{% endif %}{% if x %}" + RANGE + "{% endif %}",
        FALSE + EACH + "{% if ns.x %}" + RANGE + "{% endif %}{% set ns.x = true %}" + END,
        EACH + "{% if loop.first %}" + RANGE + "{% endif %}" + END,
        "{% macro f() %}{% endmacro %}{% if f %}" + RANGE + "{% endif %}",
    ],
)
def test_other_branches_are_counted(template: str) -> None:
    assert not renders_inside(template, BOS, EOS)


def test_variables_that_a_template_finds_defined_are_known() -> None:
    assert {*_environment().globals, "add_generation_prompt"} == _GLOBALS


def test_compiler_computes_nothing() -> None:
    """A bug: it computed `9**9**9**9`, and the process stood still."""
    chat_template("{% if tools %}{{ 9**9**9**9 }}{{ ('a' if true else x) | center(10**12) }}{% endif %}", BOS, EOS)
