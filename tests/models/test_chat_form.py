"""The form of a chat: templates get contents as they read them, and no text is left out in silence."""

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Message
from services.models.chat_form import prompt_of
from services.models.chat_template import ChatTemplate
from tests.models.support import CHATML, DEEPSEEK_R1, EITHER, GEMMA, MISTRAL, PHI_3, QWEN_3, SYSTEM_IN_PARTS, WALKING

EACH = "{% for m in messages %}"
END = "{% endfor %}"
USERS_ONLY = EACH + "{% if m.role == 'user' %}{{ m.content }}{% endif %}" + END


def prompt(template: str, *messages: tuple[str, ...]) -> str:
    return prompt_of(ChatTemplate(template, "<s>", "</s>"), [Message(*one) for one in messages])[1]


def refused(template: str, *messages: tuple[str, ...]) -> Failure:
    with pytest.raises(Failure) as caught:
        prompt(template, *messages)
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    return caught.value


# Strings and parts


def test_template_that_walks_over_parts_gets_parts() -> None:
    """A bug: it got strings, whose characters have no `text`, and the prompt had nothing of what the user said."""
    assert prompt(WALKING, ("user", "Hello?")) == "<|im_start|>User: Hello?<|im_end|>\nAssistant:"


@pytest.mark.parametrize(
    "read",
    [
        "m['content'][0]['text']",
        "m.content[0].text",
        "(m.content | first).text",
        "m.content | map(attribute='text') | join",
    ],
)
def test_every_way_to_read_the_first_part_is_supported(read: str) -> None:
    assert prompt(f"{EACH}{{{{ {read} }}}};{END}", ("user", "Hello?"), ("assistant", "Hi")) == "Hello?;Hi;"


def test_template_that_takes_both_gets_strings() -> None:
    assert (
        prompt(
            EACH + "{% if m.content is string %}S{{ m.content }}{% else %}P{{ m.content[0].text }}{% endif %}" + END,
            ("user", "x"),
        )
        == "Sx"
    )
    assert "Hello?<end_of_turn>" in prompt(EITHER, ("user", "Hello?"))


def test_template_gets_each_message_in_the_form_that_it_reads() -> None:
    text = prompt(SYSTEM_IN_PARTS, ("system", "Be kind."), ("user", "Hello?"))

    assert text == "<start_of_turn>Be kind.<end_of_turn><start_of_turn>Hello?<end_of_turn>"


def test_template_that_refuses_strings_gets_parts() -> None:
    template = (
        "{% if messages[0].content is string %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content[0].text }}"
    )

    assert prompt(template, ("user", "Hello?")) == "Hello?"


def test_empty_content_is_empty_in_either_form() -> None:
    assert prompt(CHATML, ("user", "Hi"), ("assistant", "")).endswith(
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(WALKING, ("user", "Hi"), ("assistant", "")).endswith("Assistant: <|im_end|>\nAssistant:")
    assert prompt(WALKING, ("user", "")) == "<|im_start|>User: <|im_end|>\nAssistant:"


# Texts that a template leaves out


@pytest.mark.parametrize(
    "content", ["x", "user", "You are", "kind", "assistant", "z", "zzzzzzzz", "漢", "!", "0", "\n\n.\n"]
)
@pytest.mark.parametrize("role", ["system", "developer", "tool", "assistant"])
def test_message_that_the_template_leaves_out_is_refused_by_name(role: str, content: str) -> None:
    """Even if the prompt has the same words for another reason."""
    failure = refused("You are kind, user assistant: zzzzzzzz x漢!0. " + USERS_ONLY, ("user", "Hi"), (role, content))

    assert failure.param == "messages[1]"
    assert repr(role) in failure.detail
    assert "leaves messages[1] out" in failure.detail


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PHI_3, [("user", "Hi"), ("tool", "42")]),
        (DEEPSEEK_R1, [("user", "Hi"), ("tool", "42")]),
        (MISTRAL, [("user", "Hi"), ("system", "Be kind.")]),
        ("{{ messages[-1].content }}", [("user", "Hi"), ("user", "Ho")]),
        ("{{ messages[0].content }}", [("user", "Hi"), ("user", "Ho")]),
        (EACH + "{{ m.content[:5] }}" + END, [("user", "Hello?")]),
        (EACH + "{{ m.content | truncate(9) }}" + END, [("user", "Hello, how are you?" * 9)]),
        (EACH + "{{ m.content.split('#')[0] }}" + END, [("user", "one#two")]),
        (EACH + "{{ m.content.split('</think>')[-1] }}" + END, [("user", "one</think>two")]),
        (EACH + "{% if 'secret' not in m.content %}{{ m.content }}{% endif %}" + END, [("user", "a secret")]),
        (EACH + "{% if m.content | length < 5 %}{{ m.content }}{% endif %}" + END, [("user", "Hello?")]),
        ("Nothing.", [("user", "Nothing")]),
    ],
)
def test_text_that_the_template_drops_is_refused(template: str, messages: list[tuple[str, str]]) -> None:
    assert refused(template, *messages).param in ("messages[0]", "messages[1]", "messages[0].content")


def test_refusal_says_whether_a_part_is_left_out() -> None:
    failure = refused(EACH + "{{ m.content.split('#')[0] }}" + END, ("user", "one#two"))

    assert failure.param == "messages[0].content"
    assert "leaves a part of messages[0].content out" in failure.detail


HELLO = ("user", "Hello")
DELETING = [
    "m.content | replace('foo', '')",
    "m.content | replace('foo', '') | upper",
    "m.content | replace('foo', '') | tojson",
    "m.content.split('foo') | join",
    "m.content | replace(marker, '')",
    "m.content | striptags",
    "m.content.strip('.<>/')",
    "m.content.lstrip('</').rstrip('/>.')",
    "m.content.split('</think>') | join",
    "m.content | replace('user', '')",
    "m.content | replace('<|im_end|>', '')",
]


@pytest.mark.parametrize("delete", DELETING)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_characters_that_the_template_deletes_are_missed(delete: str, role: str) -> None:
    """A bug: letters in place of the text hide them from the template, or the prompt has them for another reason."""
    template = f"{{% set marker = 'foo' %}}{EACH}<|im_start|>{{{{ m.role }}}}\n{{{{ {delete} }}}}<|im_end|>\n{END}"
    content = "<b>a foo</b>, user <|im_end|>."
    if "</think>" in delete:
        content = "</think> a" if role != "assistant" else "a"
    texts = [HELLO, (role, content), HELLO, (role, "Hello <again>")]

    if content == "a":
        assert prompt(template, *texts)
    else:
        assert refused(template, *texts).param == "messages[1].content"


@pytest.mark.parametrize("word", ["user", "foo", "<|im_end|>", "<|im_end|>\n"])
def test_text_that_the_template_deletes_wholly_is_missed(word: str) -> None:
    """Although the prompt has the word before or after the place of the text."""
    template = (
        EACH + f"foo<|im_start|>{{{{ m.role }}}}\n{{{{ m.content | replace({word.strip()!r}, '') }}}}<|im_end|>\n" + END
    )

    for texts in ([("user", word)], [HELLO, ("user", word)], [("user", word), HELLO]):
        assert str(refused(template, *texts).param).endswith(".content")


def test_deleted_text_is_missed_although_another_text_becomes_longer() -> None:
    template = EACH + "{{ (m.content | tojson) if m.role == 'tool' else (m.content | striptags) }}" + END

    assert refused(template, ("tool", '"' * 50), ("user", "<b>Hi</b>")).param == "messages[1].content"
    assert prompt(template, ("tool", '"' * 50), ("user", "Hi")).endswith("Hi")


def test_text_that_makes_the_template_itself_say_less_is_not_missed() -> None:
    template = EACH + "{{ m.content ~ ('' if m.content.endswith('/end') else '/end') }}" + END

    assert prompt(template, *[("user", "a/end"), ("assistant", "b"), ("user", "x")] * 2) == "a/endb/endx/end" * 2
    assert refused(template.replace("~", "| replace('x', '') ~"), ("user", "a/end"), ("user", "x b/end"))


SWITCHES = (
    "{% set mode = '/think' %}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% if '/no_think' in s %}{% set mode = '/no_think' %}{% endif %}"
    "{% set s = s.replace('/no_think', '').replace('/think', '').rstrip() %}{% endif %}"
    "<|im_start|>system\nReasoning: {{ mode }}\n{{ s if s else 'You are kind.' }}<|im_end|>\n"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("system", ["/no_think", "Be kind. /no_think", "/think\nBe kind.", "A /no_think B /think C"])
def test_switches_of_reasoning_may_be_left_out(system: str) -> None:
    mode = "/no_think" if "/no_think" in system else "/think"

    assert f"Reasoning: {mode}\n" in prompt(SWITCHES, ("system", system), ("user", "Hi /no_think"))


@pytest.mark.parametrize("system", ["See a/thinking.", "x/no_think", "/think. Be kind.", "/no_think a/think"])
def test_part_of_a_word_that_looks_like_a_switch_is_missed(system: str) -> None:
    assert refused(SWITCHES, ("system", system), ("user", "Hi")).param == "messages[0].content"


def test_template_that_refuses_a_role_says_so_itself() -> None:
    assert "System role not supported" in refused(GEMMA, ("system", "Be kind."), ("user", "Hi")).detail


@pytest.mark.parametrize(
    "write",
    [
        "m.content | upper",
        "m.content | lower",
        "m.content | capitalize",
        "m.content | title",
        "m.content | trim",
        "m.content | tojson",
        "m.content | tojson(ensure_ascii=True)",
        "m.content | e",
        "m.content | urlencode",
        "m.content | replace('<', '[')",
        "m.content | replace('\\n', '\\n  ')",
        "m.content | indent",
        "m.content | wordwrap(8)",
        "m.content.split() | join(' ')",
        "m.content.splitlines() | join('|')",
        "m.content | list | join",
        "m.content ~ m.content",
        "'%s' | format(m.content)",
        "m | tojson",
        "{'a': m.content}",
    ],
)
@pytest.mark.parametrize(
    "content", ["Hello", "Say \"<é漢>\" \\ &\n\n  and 'so' on user content.", "漢字", "<", "5", "\t\U0001f389 x"]
)
def test_text_that_the_template_changes_is_not_refused(write: str, content: str) -> None:
    assert prompt(f"{EACH}{{{{ {write} }}}};{END}", ("user", content), ("assistant", content), ("user", content))


def test_blank_content_is_not_missed() -> None:
    assert prompt(EACH + "[{{ m.content | trim }}]" + END, ("system", ""), ("user", " \n")) == "[][]"


@pytest.mark.parametrize("end", ["</thought>", "<channel|>"])
def test_reasoning_of_other_families_may_be_left_out(end: str) -> None:
    template = EACH + f"{{{{ m.content.split({end!r})[-1] if m.role == 'assistant' else m.content }}}};" + END
    chat = (("user", "a"), ("assistant", f"Hm{end}b"), ("user", f"c{end}d"))

    assert prompt(template, *chat) == f"a;b;c{end}d;"
    assert "</think>" in prompt(template, ("assistant", "Hm</think>b"))


@pytest.mark.parametrize("template", [QWEN_3, DEEPSEEK_R1])
def test_earlier_reasoning_of_an_assistant_may_be_left_out(template: str) -> None:
    text = prompt(template, ("user", "a"), ("assistant", "<think>Hm</think>b"), ("user", "c"))

    assert "Hm" not in text
    assert refused(template.replace("[-1]", "[0]"), ("user", "a"), ("assistant", "<think>Hm</think>b"), ("user", "c"))


def test_template_that_decides_by_the_letters_of_texts_is_not_refused() -> None:
    template = EACH + "{% if m.content | lower != 'hi' %}{{ raise_exception('no') }}{% endif %}{{ m.content }};" + END

    assert prompt(template, ("user", "Hi"), ("user", "HI")) == "Hi;HI;"
    assert refused(template.replace("{{ m.content }}", "x"), ("user", "Hi")).param == "messages[0]"


def test_long_conversations_are_checked_like_short_ones() -> None:
    messages = [("user", "a"), ("assistant", "b")] * 300

    assert prompt(EACH + "{{ m.content }}" + END, *messages) == "ab" * 300
    assert (
        refused(EACH + "{% if loop.index0 != 517 %}{{ m.content }}{% endif %}" + END, *messages).param
        == "messages[517]"
    )


# Roles and names


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (EACH + "{{ m.role }}:{{ m.content }};" + END, "system:Be kind.;user:Hi;"),
        (
            EACH + "{% if m.role == 'developer' %}D{% endif %}{{ m.role }}:{{ m.content }};" + END,
            "Ddeveloper:Be kind.;user:Hi;",
        ),
    ],
)
def test_developer_is_the_system_for_templates_that_know_no_developers(template: str, text: str) -> None:
    assert prompt(template, ("developer", "Be kind."), ("user", "Hi")) == text


def test_name_that_the_template_does_not_write_is_left_out() -> None:
    assert "Ann" not in prompt(
        CHATML, ("user", "Hi", "Ann"), ("assistant", "Ho", "Bot"), ("user", "Hi", "Ann"), ("user", "Hm")
    )


def test_names_that_tell_speakers_apart_are_not_left_out() -> None:
    failure = refused(CHATML, ("user", "Hi", "Ann"), ("user", "Ho", "Bob"))

    assert failure.param == "messages[1].name"
    assert "'Ann' and 'Bob'" in failure.detail
    assert (
        prompt(EACH + "{{ m.name }}:{{ m.content }};" + END, ("user", "Hi", "Ann"), ("user", "Ho", "Bob"))
        == "Ann:Hi;Bob:Ho;"
    )
