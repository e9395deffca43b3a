"""The disguise: letters in place of texts show how much of each text the prompt has, and where."""

import pytest

from services.core.errors import Failure
from services.models.chat import Chat
from services.models.chat_template import ChatTemplate
from services.models.disguise import FULL, keeping_literals, keeping_signs, keeping_switches, shown


def chat_of(template: str, *contents: str) -> Chat:
    roles = ("user",) * len(contents)
    return Chat(ChatTemplate(template, "", ""), roles, contents + ("",) * len(contents))


def test_characters_of_each_text_are_counted_and_located() -> None:
    seen = shown(chat_of("<{{ messages[1].content }}>{{ messages[0].content[:2] | upper }};;", "abc", "d e"), FULL)

    assert seen.counts == {1: 2, 0: 2}
    assert seen.runs == ((1, 1), (1, 1), (0, 1))
    assert seen.after == 2


@pytest.mark.parametrize("count", [15, 16, 300])
def test_many_texts_are_told_apart(count: int) -> None:
    seen = shown(chat_of("{% for m in messages %}{{ m.content }}{% endfor %}", *["x"] * count), FULL)

    assert seen.counts == dict.fromkeys(range(count), 1)


def test_template_that_goes_by_single_letters_is_refused() -> None:
    """The renderings with different letters have different lengths: nothing can be read from them."""
    with pytest.raises(Failure, match="treats some letters differently"):
        shown(chat_of("{{ messages[0].content | replace('a', '') }}", "Hello"), FULL)


def test_disguises_keep_what_the_template_looks_for() -> None:
    template = ChatTemplate("{{ messages[0].content.replace('/no_think', '').split('<b>') }}", "", "")
    text = "Hi, <b> a/no_think /no_think"

    assert FULL.of(text) == "zzz zzz zzzzzzzzzz zzzzzzzzz"
    assert keeping_switches(template).of(text) == "zzz zzz zzzzzzzzzz /no_think"
    assert keeping_literals(template).of(text) == "zzz <b> z/no_think /no_think"
    assert keeping_signs(template).of(text) == "zz, <b> z/no_think /no_think"
