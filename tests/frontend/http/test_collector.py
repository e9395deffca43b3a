"""A unary answer is gathered choice by choice, however the choices' tokens come mixed."""

from services.frontend.http.collector import Collector
from services.request import Delta, FinishReason, TokenLogprobs


def test_choices_are_put_together_and_stand_in_order() -> None:
    collector = Collector()

    for delta in (
        Delta(0, [1], "b", choice=1),
        Delta(0, [2], "a", choice=0),
        Delta(1, (), "B", choice=1, finish_reason=FinishReason.LENGTH),
        Delta(1, (), "A", choice=0, finish_reason=FinishReason.STOP),
    ):
        collector.deliver(delta)

    assert [(index, one.text, one.finish_reason) for index, one in collector.choices.items()] == [
        (0, "aA", FinishReason.STOP),
        (1, "bB", FinishReason.LENGTH),
    ]


def test_only_tokens_with_log_probabilities_are_kept() -> None:
    collector = Collector()

    collector.deliver(Delta(0, [1, 2], "ab"))
    collector.deliver(Delta(2, [3], "c", logprobs=[TokenLogprobs(-1.0)]))
    collector.deliver(Delta(3, (), "", logprobs=[]))

    assert collector.choices[0].token_ids == [3]
    assert collector.choices[0].logprobs == [TokenLogprobs(-1.0)]


def test_nothing_has_come_until_something_does() -> None:
    assert not Collector().choices
