"""Log probabilities: natural logarithms of the softmax over the model's own scores.

Before temperature, penalties, biases and forms: they say what the model thinks, whatever was asked of it. They depend
on the scores alone, which are the same to the bit after every cut. Cost for a vocabulary of 49,152 tokens: 1 to 2 ms to
have the scores as Python's numbers and some 6 ms for this; nothing for requests that did not ask.
"""

import heapq
import math
from collections.abc import Sequence

from services.request import TokenLogprobs


def token_logprobs(scores: Sequence[float], token: int, rival_count: int) -> TokenLogprobs:
    """Of `token`, and of the `rival_count` likeliest tokens, itself among them or not; of equals the lower id first."""
    highest = max(scores)
    # An exact sum, so that it does not depend on the order of addition, nor on the version of Python.
    total = highest + math.log(math.fsum([math.exp(score - highest) for score in scores]))
    top = tuple((one, scores[one] - total) for one in _likeliest(scores, rival_count))
    return TokenLogprobs(scores[token] - total, top)


def _likeliest(scores: Sequence[float], count: int) -> list[int]:
    if count == 0:
        return []
    least = heapq.nlargest(count, scores)[-1]
    candidates = [token for token, score in enumerate(scores) if score >= least]
    return sorted(candidates, key=lambda token: (-scores[token], token))[:count]
