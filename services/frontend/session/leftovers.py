"""Records that workers keep of answers which continue elsewhere, since their sessions were lost: they are discarded."""

from collections import OrderedDict

from services.frontend.session.generations import SessionGenerations

LEFTOVERS_KEPT = 4096
"""How many records a frontend means to discard at workers that it cannot reach. Those beyond wait for their grace."""


class Leftovers:
    """Discards records: at once where there is a session, or else when one comes.

    A worker that lives goes on with the requests of a lost session, for their grace, and counts them in its limits.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, SessionGenerations] = {}  # By instance id.
        self._waiting: OrderedDict[tuple[str, bytes, int], int] = OrderedDict()  # With the epoch; oldest first.

    def discard(self, instance_id: str, generation_id: bytes, index: int, epoch: int) -> None:
        """Discard the record of a choice that continues on another worker. `epoch`: higher than that of the record."""
        if (generations := self._sessions.get(instance_id)) is not None:
            generations.discard(generation_id, index, epoch)
            return
        self._waiting[instance_id, generation_id, index] = epoch
        if len(self._waiting) > LEFTOVERS_KEPT:
            self._waiting.popitem(last=False)

    def on_session(self, instance_id: str, generations: SessionGenerations) -> None:
        """There is a session to this worker, on which no request has been sent: it could replace a record."""
        self._sessions[instance_id] = generations
        for key in [key for key in self._waiting if key[0] == instance_id]:
            _, generation_id, index = key
            generations.discard(generation_id, index, self._waiting.pop(key))

    def on_lost(self, instance_id: str) -> None:
        """The session is over. Ignored if there was none."""
        self._sessions.pop(instance_id, None)
