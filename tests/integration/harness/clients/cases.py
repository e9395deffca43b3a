"""The kinds of requests whose answers a fault must not change."""

from collections.abc import Mapping
from dataclasses import replace

from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import Request

TOKENS = 64
GREEDY = Request(max_tokens=TOKENS)
SEEDED = replace(GREEDY, temperature=0.8)
CASES = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        SEEDED, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias={97: 5.0}
    ),
    "logprobs": replace(SEEDED, logprobs=3),
    "chat with logprobs": replace(SEEDED, is_chat=True, logprobs=3),
    "two choices": replace(SEEDED, n=2),
    "all scripts": replace(GREEDY, is_chat=True, prompt="日本語 🎉 с ёлкой"),
}
STOPS = ("stop string", "stop token", "min_tokens", "stop string after min_tokens")
"""The names of `with_stops`."""
OFTEN = tuple(b"etaoin ")


def with_stops(seeded: Answer) -> Mapping[str, Request]:
    """Cases that end in the middle of the seeded answer."""
    assert seeded.token_ids is not None
    first: dict[int, int] = {}
    for position, token in enumerate(seeded.token_ids):
        first.setdefault(token, position)
    late = next(token for token, position in first.items() if position >= TOKENS // 2)
    return {
        "stop string": replace(SEEDED, stop=seeded.text[20:26]),
        "stop token": replace(SEEDED, stop_token_ids=(late,)),
        "min_tokens": replace(SEEDED, stop_token_ids=OFTEN, min_tokens=TOKENS // 2),
        "stop string after min_tokens": replace(SEEDED, stop=" ", min_tokens=TOKENS // 2, logprobs=3),
    }
