"""Workers that say other things than ours: lies that break the protocol of sessions, and ends that come late."""

import random
from collections.abc import Callable
from typing import Any

from simulation.runtime.world import World
from simulation.scenario.watching import Watched, watch

EXCUSED = frozenset({"worker broke the protocol"})
"""What frontends log of it."""


_PLACE = "services.worker.outbox:Outbox.pop_message"
HELD_BACK_ODDS = 0.3


class Liars:
    """Changes messages of workers to frontends."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._due: dict[str, list[Callable[[Any], bool]]] = {}  # By the name of the worker.
        watch([Watched("", _PLACE, self._on_message)], lambda name: None)

    def lie(self, worker: str) -> None:
        """One of the worker's next messages breaks the protocol."""
        self._due.setdefault(worker, []).append(self._chance.choice(_ACTS))

    def _on_message(self, message: Any, _outbox: object) -> bool:
        assert self._world.current is not None
        name = self._world.current.name
        due = self._due.get(name)
        if due and due[0](message):
            due.pop(0)
            self._world.say(name, "lies")
        return False


class LateEnds:
    """Lets workers send some ends of streams with the message after the one with the others."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        watch([Watched("", _PLACE, self._on_message)], lambda name: None)

    def _on_message(self, message: Any, outbox: Any) -> bool:
        late = [end for end in message.ends if self._chance.random() < HELD_BACK_ODDS]
        if late and len(message.ends) > 1:
            kept = [end for end in message.ends if end not in late]
            del message.ends[:]
            message.ends.extend(kept)
            outbox._message.ends.extend(late)  # The next one, so that the worker knows that it owes them.
            outbox._on_change()
        return False


def _repeat(message: Any) -> bool:
    """Tokens come at a position that has one already."""
    positions = message.step.positions
    if not positions or not positions[0]:
        return False
    positions[0] -= 1
    return True


def _skip(message: Any) -> bool:
    """A token is left out."""
    if not message.step.positions:
        return False
    message.step.positions[0] += 1
    return True


def _say_twice(message: Any) -> bool:
    """The same tokens come twice."""
    step = message.step
    if not step.positions or step.HasField("logprob_columns"):
        return False
    step.stream_ids.append(step.stream_ids[0])
    step.positions.append(step.positions[0])
    step.token_counts.append(step.token_counts[0])
    step.token_ids.extend(step.token_ids[: step.token_counts[0]])
    return True


def _forget_a_column(message: Any) -> bool:
    """The columns of a step have different lengths: the whole session is lost."""
    if not message.step.positions:
        return False
    del message.step.positions[-1]
    return True


def _leave_out_marker(message: Any) -> bool:
    """The end of a stream is not marked as such."""
    if not message.ends or not message.ends[0].complete_final:
        return False
    message.ends[0].complete_final = False
    return True


_ACTS: tuple[Callable[[Any], bool], ...] = (_repeat, _skip, _say_twice, _forget_a_column, _leave_out_marker)
