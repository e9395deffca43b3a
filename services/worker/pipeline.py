"""The order of a request's layers in a worker, above the engine."""

import random
from collections.abc import Callable
from functools import partial

from services.core.common_layers import Accept, Deadline, Guard
from services.core.gate import Gate
from services.core.interface import Layer
from services.core.model_card import ModelCard
from services.worker.validate import Validate


def worker_layers(
    *, gate: Gate, card_of: Callable[[], ModelCard], rng: random.Random
) -> list[Callable[[Layer], Layer]]:
    """The layers over `Execute`, outermost first. Where the order of two neighbours shows, a test swaps them and fails.

    `card_of`: returns the model card, which is known once the engine has loaded.
    """
    return [
        Guard,  # Above every layer that can have a bug.
        partial(Accept, gate=gate),  # Above the deadline: a refusal by a draining worker sets no timer.
        Deadline,  # Above every wait, including the wait for a slot.
        partial(Validate, card_of=card_of, rng=rng),  # Above admission: an invalid request takes no place.
    ]
