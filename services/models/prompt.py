"""Turns a prompt into token ids: a pure function of plain values, so that any process can call it."""

from services.core.model_card import ModelCard
from services.core.request import Message
from services.models.chat_template import render_chat
from services.models.tokenizers import Tokenizer


def prompt_token_ids(card: ModelCard, tokenizer: Tokenizer, prompt: str | tuple[Message, ...]) -> tuple[int, ...]:
    """The ids of a text, or of a chat in the model's template. Raises INVALID_ARGUMENT.

    A text gets the special tokens that the model expects; a chat has those that its template writes.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special=True))
    return tuple(tokenizer.encode(render_chat(card, prompt), add_special=False))
