"""What one tenant has had of a worker, and what it has waiting there."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import groupby, takewhile

OUTPUT_PRICE = 2
"""What a token of an answer counts, where a token of a prompt counts 1. Source: the paper named in `fair_queue.py`."""


class WaitingGroup:
    """The choices of one request that wait.

    `number`: grows with every request that waits, so it gives the order of arrival. `tokens`: of the prompt, for each
    choice.
    """

    __slots__ = ("number", "tokens")

    def __init__(self, number: int, tokens: int) -> None:
        self.number = number
        self.tokens = tokens


class Account:
    """The service that one tenant has received, and its queue.

    `input_tokens`: of prompts, each counted when its request gets a slot. `output_tokens`: counted as they leave the
    engine. Both only grow, so the counter does too. `queue`: key → group of each waiting request, first come first.
    `waiting_tokens`: of their prompts. `label`: the tenant's name in metrics; None until the account is kept.
    """

    __slots__ = ("_lift", "input_tokens", "label", "name", "output_tokens", "queue", "waiting_tokens", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.label: str | None = None
        self.input_tokens = 0
        self.output_tokens = 0
        self.queue: OrderedDict[Hashable, WaitingGroup] = OrderedDict()
        self.waiting_tokens = 0
        self._lift = 0.0

    @property
    def counter(self) -> float:
        """The virtual counter: the service by weight, and what it was lifted by."""
        return self._lift + self._service / self.weight

    @property
    def _service(self) -> int:
        return self.input_tokens + OUTPUT_PRICE * self.output_tokens

    def lift(self, floor: float) -> None:
        """Raise the counter to `floor`, if it is lower."""
        if (counter := self.counter) < floor:
            self._lift += floor - counter

    def reweigh(self, weight: float) -> None:
        """Change the weight for the service to come. The counter stays."""
        counter, self.weight = self.counter, weight
        self._lift = counter - self._service / weight

    @property
    def first(self) -> WaitingGroup:
        """The request that is next. There must be one."""
        return next(iter(self.queue.values()))

    @property
    def first_count(self) -> int:
        """How many choices of it wait."""
        first = self.first
        return sum(1 for _ in takewhile(lambda group: group is first, self.queue.values()))

    def newest_first(self) -> Iterator[list[Hashable]]:
        """The waiting choices of each request, the newest request first."""
        for _, items in groupby(reversed(self.queue.items()), key=lambda item: item[1]):
            yield [key for key, _ in items]
