"""Turns a prompt into token ids: a pure function of plain values, so that any process can call it."""

from services.core.errors import invalid
from services.core.model_card import ModelCard
from services.core.request import Message
from services.models.chat_form import prompt_of
from services.models.chat_template import chat_template
from services.models.control_tokens import control_tokens, ids_with_texts_as_text
from services.models.tokenizers import Tokenizer


def prompt_token_ids(
    card: ModelCard, tokenizer: Tokenizer, prompt: str | tuple[Message, ...], *, parses_contents: bool = False
) -> tuple[int, ...]:
    """The ids of a text, or of a chat in the model's template. Raises INVALID_ARGUMENT.

    A text gets the special tokens that the model expects, and those that it spells are recognised. A chat has those
    that its template writes. `parses_contents`: also those that its messages spell; otherwise messages are text.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special=True))
    if not card.chat_template:
        raise invalid("messages", f"{card.model!r} has no chat template: use /v1/completions, or text")
    template = chat_template(card.chat_template, card.bos_token, card.eos_token)
    chat, text = prompt_of(template, prompt)
    if not parses_contents and control_tokens(tokenizer, template).may_be_in(chat.texts):
        return tuple(ids_with_texts_as_text(chat, text, tokenizer))
    return tuple(tokenizer.encode(text, add_special=False))
