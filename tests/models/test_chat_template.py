"""The chat template: it gets all that transformers provides, and an error in it fails only the request."""

from dataclasses import replace
from datetime import datetime

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.core.request import Message
from services.models.chat_template import render_chat
from tests.support.doubles import CARD

CHAT = (Message("system", "Be kind."), Message("user", "Hi", "Ann"))


def rendered(template: str, bos_token: str = "") -> str:
    return render_chat(replace(CARD, chat_template=template, bos_token=bos_token), CHAT)


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
