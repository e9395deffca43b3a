"""One worker as routing sees it: a session feeds it with events, admission and routing read its state."""

from collections.abc import Callable, Sequence

from services.core.call import RoutedSession
from services.core.errors import RefusedFor
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.routing.capacity import Capacity
from services.frontend.routing.load import Occupancy, WorkerLoad
from services.frontend.routing.state import Needs, State
from services.frontend.routing.thresholds import is_busy
from services.runtime.loop import clock as monotonic
from services.stubs import worker_pb2


def _ignore(_: "Candidate") -> None:
    """For a session that is not in a pool."""


class Candidate:
    """A worker that requests can be sent to on one session.

    `quarantined_until`: absolute, in event-loop time; until then other workers are preferred.
    """

    def __init__(
        self,
        session: RoutedSession,
        instance_id: str,
        *,
        full_s: float,
        on_change: "Callable[[Candidate], None]" = _ignore,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`session`: where requests to the worker are sent.

        `on_change`: called when the worker may have room again, and when it leaves.
        """
        self.session = session
        self.key = session.key
        self.instance_id = instance_id
        self.is_draining = False
        self.is_lost = False
        self.quarantined_until = 0.0
        self.load = WorkerLoad(clock)
        self.capacity = Capacity(full_s, self._notify)
        self._on_change = on_change

    def _notify(self) -> None:
        self._on_change(self)

    # What routing reads

    def state(self, needs: Needs, now: float) -> State:
        """The state of the worker for one call: see `state.py`. `now`: in event-loop time."""
        if self.is_draining or self.is_lost:
            return State.GONE
        if self.capacity.is_full(needs.count, needs.tokens, needs.tenant):
            return State.FULL
        if self.key in needs.excluded:
            return State.EXCLUDED
        if needs.thresholds is not None and is_busy(self.load.ranks(), needs.thresholds):
            return State.BUSY
        return State.HEALTHY if self.quarantined_until <= now else State.QUARANTINED

    @property
    def is_closed(self) -> bool:
        """Whether the worker can take no request at all before it changes."""
        return self.is_draining or self.is_lost or self.capacity.is_closed

    @property
    def in_flight_count(self) -> int:
        """This frontend's own requests on the worker."""
        return self.capacity.in_flight_count

    @property
    def occupancy(self) -> Occupancy:
        """How full the worker is, as far as is known."""
        return self.load.occupancy(self.capacity.in_flight_count)

    def ranks(self) -> Sequence[worker_pb2.RankLoad]:
        """The load of each rank whose report still counts."""
        return self.load.ranks()

    # Events

    def on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """The worker has named its limits. This is the first event."""
        self.load.on_welcome(welcome)
        self.capacity.on_welcome(welcome)

    def on_opened(self, count: int, tenant: Tenant = EVERYBODY) -> None:
        """`count` requests were sent to the worker."""
        if not self.capacity.in_flight_count:
            self.load.set_in_use(True)
        self.capacity.on_opened(count, tenant)

    def on_closed(self, *, frees_room: bool, tenant: Tenant = EVERYBODY) -> None:
        """A request has ended. `frees_room`: it had a slot or a place, which another request can have now."""
        if self.is_lost:
            return
        has_room_again = self.capacity.on_closed(frees_room=frees_room, tenant=tenant)
        if not self.capacity.in_flight_count:
            self.load.set_in_use(False)
        if has_room_again:
            self._notify()

    def on_load(self, load: worker_pb2.Load) -> None:
        """The worker has sent a load: a report, or a heartbeat without ranks."""
        self.load.add(load)
        if self.capacity.on_load(load):
            self._notify()

    def on_refused(self, bound: RefusedFor, count: int, tokens: int, tenant: Tenant = EVERYBODY) -> None:
        """The worker has refused a request for capacity: see `Capacity.on_refused`. Ignored once it is lost."""
        if not self.is_lost:
            self.capacity.on_refused(bound, count, tokens, tenant)

    def on_draining(self) -> None:
        """The worker leaves: it finishes the requests that it has and takes no new ones."""
        self.is_draining = True
        self._notify()

    def on_lost(self) -> None:
        """The session is over."""
        self.is_lost = True
        self.capacity.on_lost()
