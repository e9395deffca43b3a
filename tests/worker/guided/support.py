"""A guide for tests of engines: it computes masks in place, and may be late."""

from collections.abc import Iterable, Sequence

from services.core.request import Guided
from services.worker.guided.grammar import GrammarBuilder


class PlainGuide:
    """The guide of one answer. `delays`: how often it is late before each token."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        end_ids: Iterable[int],
        guided: Guided,
        generated: Sequence[int] = (),
        delays: int = 0,
    ) -> None:
        self._grammar = GrammarBuilder(token_bytes, end_ids).build(guided, generated)
        self._delays = self._delays_left = delays

    @property
    def is_complete(self) -> bool:
        return self._grammar.is_complete

    def wait_ready(self, timeout_s: float) -> bool:
        self._delays_left -= 1
        return self._delays_left < 0

    def token_mask(self) -> bytes:
        return self._grammar.token_mask()

    def accept_token(self, token: int) -> None:
        self._grammar.accept_token(token)
        self._delays_left = self._delays
