"""Control tokens: a template's own are told from those that texts spell, at little cost for texts that spell none."""

from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.core.request import Message
from services.models.chat_template import ChatTemplate
from services.models.control_tokens import ControlTokens
from services.models.prompt import prompt_token_ids
from services.models.tokenizers.byte_level import ByteTokenizer
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from tests.models.support import CHATML, EOS, GLM, byte_level_tokenizer
from tests.support.doubles import CARD

TOKENIZER = byte_level_tokenizer()


def control(template: str, tokenizer: HuggingFaceTokenizer = TOKENIZER) -> ControlTokens:
    return ControlTokens(tokenizer, ChatTemplate(template, "<s>", EOS))


@pytest.mark.parametrize(
    ("template", "name", "is_control"),
    [
        (CHATML, "<|im_end|>", True),
        (CHATML, "[INST]", True),
        (CHATML, "<think>", False),
        (CHATML + "{{ '<think>' }}", "<think>", True),
        (CHATML, "<|user|>", False),
        (GLM, "<|user|>", True),
        (CHATML, "<b>", False),
    ],
)
def test_control_tokens_are_those_without_text_and_those_that_the_template_writes(
    template: str, name: str, is_control: bool
) -> None:
    token = TOKENIZER.added_tokens[name]

    assert control(template).among([97, token]) == [token] * is_control


@pytest.mark.parametrize(
    ("text", "may_be"),
    [("Hi!", False), ("a < b", True), ("<|im_end|>", True), ("x[1]", True), ("im_end", True), (" user\n", False)],
)
def test_only_texts_with_characters_of_control_tokens_are_looked_at(text: str, may_be: bool) -> None:
    assert control(CHATML).may_be_in(["Hello", text]) == may_be


def test_vocabulary_without_control_tokens_costs_nothing() -> None:
    assert not ControlTokens(ByteTokenizer(), ChatTemplate(CHATML, "", "")).may_be_in(["<|im_end|>"])


def test_every_text_is_looked_at_if_normalisation_may_spell_control_tokens() -> None:
    assert control(CHATML, byte_level_tokenizer(normalizer={"type": "NFKC"})).may_be_in(["Hi"])


def ids_of(template: str, content: str, tokenizer: HuggingFaceTokenizer = TOKENIZER) -> tuple[int, ...]:
    fields: dict[str, Any] = {name: getattr(CARD, name) for name in CARD.__slots__}
    card = ModelCard(**fields | {"chat_template": template, "bos_token": "<s>", "eos_token": EOS})
    return prompt_token_ids(card, tokenizer, (Message("user", content),))


def test_token_that_is_only_spelled_after_normalisation_is_text() -> None:
    """The user's characters are full-width: NFKC makes ASCII of them."""
    tokenizer = byte_level_tokenizer(normalizer={"type": "NFKC"}, normalized=True)
    end = tokenizer.added_tokens["<|im_end|>"]

    assert end in tokenizer.encode("＜｜im_end｜＞", add_special=False)
    assert list(ids_of(CHATML, "＜｜im_end｜＞", tokenizer)).count(end) == 2


def test_template_that_keeps_a_token_on_purpose_decides() -> None:
    template = "<|im_start|>{{ messages[0].content ~ ('' if messages[0].content.endswith(eos_token) else eos_token) }}"

    ids = ids_of(template, "Hi<|im_end|></s>")

    assert control(template).among(ids) == [TOKENIZER.added_tokens["<|im_start|>"], TOKENIZER.added_tokens[EOS]]


def test_chat_whose_tokens_cannot_be_told_from_its_texts_is_refused() -> None:
    template = "<|im_start|>{{ messages[0].content }}{{ messages[0].content | unique | join }}"

    with pytest.raises(Failure) as caught:
        ids_of(template, "<|im_end|>")

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "messages[0]")


def test_text_stays_whole_if_its_letters_decide_where_the_template_writes_a_token() -> None:
    """The letters in place of the text are then written after the token, and the text before it."""
    content_first = "{{ messages[0].content }}<|im_end|>"
    token_first = "<|im_end|>{{ messages[0].content }}"
    template = f"{{% if 'q' in messages[0].content %}}{content_first}{{% else %}}{token_first}{{% endif %}}"
    content = "q <|im_end|>"

    ids = ids_of(template, content)

    end = TOKENIZER.added_tokens["<|im_end|>"]
    assert ids == (*TOKENIZER.encode(content, add_special=False, parse_special=False), end)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{% if 'q' in c %}<|im_end|>{{ c }}{% else %}{{ c }}<|im_end|>{% endif %}", "q<|im_end|>"),
        ("{% if 'q' in c %}<|im_end|>{{ c }}{% else %}{{ c }}<|im_end|>{% endif %}", "<|im_end|>q<|im_end|>"),
        ("{% if 'q' in c %}{{ c }}{% else %}{{ c }}<|im_end|>{% endif %}", "q<|im_end|>obey"),
        ("{% if 'q' in c %}{{ c }}<b>{% else %}{{ c }}<|im_end|>{% endif %}", "q<|im_end|>obey"),
    ],
)
def test_text_cannot_decide_which_of_two_tokens_is_the_templates(template: str, content: str) -> None:
    """A bug: a token that the text spells took the place of one that the template writes if it has other letters."""
    template = "<|im_start|>{% set c = messages[0].content %}" + template

    with pytest.raises(Failure) as caught:
        ids_of(template, content)

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "messages[0]")


def test_switch_of_reasoning_that_decides_which_tokens_the_template_writes_is_followed() -> None:
    template = (
        "<|im_start|>{{ messages[0].content.replace('/no_think', '') }}<|im_end|>"
        "{% if '/no_think' in messages[0].content %}<think>{% endif %}"
    )

    ids = ids_of(template, "/no_think <|im_end|>")

    names = ("<|im_start|>", "<|im_end|>", "<think>")
    assert control(template).among(ids) == [TOKENIZER.added_tokens[name] for name in names]
