"""The prompt: a text and a chat become the ids that the model expects."""

from services.core.request import Message
from services.models.prompt import prompt_token_ids
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.support.doubles import CARD

CHAT = (Message("system", "Be kind."), Message("user", "Hi"))


def test_text_is_encoded_as_it_is() -> None:
    assert prompt_token_ids(CARD, ByteTokenizer(), "hé") == tuple("hé".encode())


def test_chat_is_encoded_in_the_models_template() -> None:
    assert bytes(prompt_token_ids(CARD, ByteTokenizer(), CHAT)) == b"<system>Be kind.<user>Hi"
