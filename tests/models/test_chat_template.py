"""The chat template: it gets all that transformers provides, and an error in it fails only the request."""

from datetime import datetime

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.models.chat_template import ChatTemplate

TURNS = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi", "name": "Ann"}]


def rendered(template: str, bos_token: str = "") -> str:
    return ChatTemplate(template, bos_token, "").render(TURNS)


def test_template_gets_the_special_tokens_and_add_generation_prompt() -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}"

    assert rendered(template, bos_token="<s>") == "<s>||True"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{{ messages[1].content ~ '<é>' }}|{{ {'a': '<é>'} | tojson }}", 'Hi<é>|{"a": "<é>"}'),
        ("{% for m in messages %}{{ m.name if 'name' in m else 'nobody' }} {% endfor %}", "nobody Ann "),
        ("{% if tools is not none or documents is not none %}tools{% endif %}.", "."),
        ("a{% generation %}{{ messages[1].content }}{% endgeneration %}b", "aHib"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("  {% if true %}\nline\n  {% endif %}\n", "line\n"),
    ],
    ids=[
        "loop controls",
        "plain JSON",
        "names",
        "no tools",
        "generation blocks",
        "the date",
        "trimmed blocks",
    ],
)
def test_template_has_the_features_that_templates_of_hugging_face_use(template: str, text: str) -> None:
    assert rendered(template) == text


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{% for x in %}", "{{ messages.__class__.__mro__ }}{{ 1/0 }}"],
    ids=["its own check", "its syntax", "an unsafe or broken expression"],
)
def test_template_that_fails_is_an_invalid_argument(template: str) -> None:
    with pytest.raises(Failure) as caught:
        rendered(template)

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "messages")


def test_quoted_messages_are_truncated_in_the_failure() -> None:
    with pytest.raises(Failure) as caught:
        rendered("{{ raise_exception('no ' ~ messages[1].content * 1000) }}")

    assert len(caught.value.detail) < QUOTED_CHARACTERS_MAX + 100


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"], ids=["escape", "change"]
)
def test_template_can_access_only_its_variables(template: str) -> None:
    with pytest.raises(Failure, match="unsafe"):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% if '<a>' in m %}",
        "{% if m == '<a>' %}",
        "{% if m in ['x', '<a>'] %}",
        "{% if m.startswith('<a>') %}",
        "{% if m.split('<a>')[0] %}",
        "{% if m | replace('<a>', '') %}",
        "{% if m is eq('<a>') %}",
        "{% if m.endswith(eos_token) %}",
    ],
)
def test_literals_are_what_the_template_looks_for_in_texts(template: str) -> None:
    assert "<a>" in ChatTemplate(template + "{% endif %}", "", "<a>").literals


@pytest.mark.parametrize(
    "template",
    ["{{ '<a>' + m }}", "<a>{{ m }}", "{{ eos_token }}", "{{ raise_exception('<a>') }}", "{% set m = '<a>' %}"],
)
def test_what_the_template_writes_is_no_literal(template: str) -> None:
    assert ChatTemplate(template, "", "<a>").literals == set()


@pytest.mark.parametrize(
    ("template", "is_known"),
    [
        ("{% if m.role == 'developer' %}{% endif %}", True),
        ("{% if m.role in ['system', 'developer'] %}{% endif %}", True),
        ("You help a developer.", False),
        ("{{ 'You help a developer.' }}", False),
    ],
)
def test_template_knows_developers_if_it_names_the_role(template: str, is_known: bool) -> None:
    assert ChatTemplate(template, "", "").knows_developer == is_known
