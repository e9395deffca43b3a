"""ModelCard: cards with equal content are equal, and a card promises no more than its engine says."""

from dataclasses import FrozenInstanceError, replace

import pytest

from services.core.model_card import ModelCard, Resume, TokenizerRef
from tests.support.doubles import CARD


def test_cards_are_equal_if_all_their_fields_are() -> None:
    assert replace(CARD) == CARD
    assert replace(CARD, context_length=CARD.context_length + 1) != CARD
    assert replace(CARD, tokenizer=TokenizerRef("gguf", "0" * 64)) != CARD
    assert replace(CARD, resume=Resume(guided=True)) != CARD


def test_a_card_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CARD.model = "other"  # type: ignore[misc]


def test_a_card_that_says_nothing_more_has_no_grammars_and_no_log_probabilities() -> None:
    card = ModelCard(model="m", engine="e", context_length=8, vocab_size=9, tokenizer=TokenizerRef("bytes"))

    assert (card.guided, card.has_logprobs) == ((), False)
    assert (card.resume.guided, card.resume.logprobs) == (False, False)
