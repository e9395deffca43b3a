"""An event loop in which a crowd cannot keep everybody else waiting.

A plain loop takes all events that there are in one turn: with 5,000 requests at once a turn takes seconds, and for as
long nothing else happens, no token of another stream and no answer to a probe. Here whoever belongs to the crowd has a
few events a turn, in the order they came; the others wait in the kernel, where they cost no memory of ours. Events of
everything else are all taken in each turn, as ever.
"""

import asyncio
import select
import selectors
import socket
from collections import ChainMap
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

CROWD_EVENTS_MAX = 16
"""A turn: with what follows from them some milliseconds."""

Ready = list[tuple[selectors.SelectorKey, int]]


class FairSelector(selectors.BaseSelector):
    """An epoll within an epoll: the crowd's, which is asked for a few events only, is one event source of the other."""

    def __init__(self) -> None:
        self._others = selectors.EpollSelector()
        self._crowd = select.epoll()
        self._crowd_keys: dict[int, selectors.SelectorKey] = {}
        self._members: WeakValueDictionary[int, socket.socket] = WeakValueDictionary()
        self._others.register(self._crowd.fileno(), selectors.EVENT_READ)

    def add_member(self, sock: socket.socket) -> None:
        """The socket belongs to the crowd until it is closed. Call it before the loop waits for the socket."""
        self._members[sock.fileno()] = sock

    @property
    def crowd_count(self) -> int:
        """How many members are registered."""
        return len(self._crowd_keys)

    def _is_member(self, fd: int) -> bool:
        sock = self._members.get(fd)
        return sock is not None and sock.fileno() == fd  # A closed one has no number: another has it by now.

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = _fd_of(fileobj)
        if not self._is_member(fd):
            return self._others.register(fileobj, events, data)
        self._crowd.register(fd, _to_epoll(events))
        self._crowd_keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._crowd_keys[fd]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._crowd_keys.pop(_fd_of(fileobj), None)
        if key is None:
            return self._others.unregister(fileobj)
        self._crowd.unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._crowd_keys.get(_fd_of(fileobj))
        if key is None:
            return self._others.modify(fileobj, events, data)
        if events != key.events:
            self._crowd.modify(key.fd, _to_epoll(events))
        self._crowd_keys[key.fd] = changed = key._replace(events=events, data=data)
        return changed

    def select(self, timeout: float | None = None) -> Ready:
        ready = self._others.select(timeout)
        crowd_fd = self._crowd.fileno()
        for index, (key, _) in enumerate(ready):
            if key.fd == crowd_fd:
                del ready[index]
                return ready + self._some_of_crowd()
        return ready

    def _some_of_crowd(self) -> Ready:
        some = []
        for fd, found in self._crowd.poll(0, CROWD_EVENTS_MAX):
            key = self._crowd_keys[fd]
            some.append((key, _from_epoll(found) & key.events))
        return some

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._crowd_keys.get(_fd_of(fileobj)) or self._others.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return ChainMap(self._crowd_keys, self._others.get_map())  # type: ignore[arg-type]  # None of it is copied.

    def close(self) -> None:
        self._crowd.close()
        self._others.close()


class FairLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=FairLoop)`."""

    def __init__(self) -> None:
        self._fair = FairSelector()
        super().__init__(self._fair)

    def add_to_crowd(self, sock: socket.socket) -> None:
        """See FairSelector.add_member."""
        self._fair.add_member(sock)

    @property
    def crowd_count(self) -> int:
        """How many belong to the crowd, and are listened to."""
        return self._fair.crowd_count


def add_to_crowd(sock: socket.socket) -> None:
    """Make the socket one of the running loop's crowd; under a loop without one it stays as it is."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, FairLoop):
        loop.add_to_crowd(sock)


def _fd_of(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


def _to_epoll(events: int) -> int:
    return (events & selectors.EVENT_READ and select.EPOLLIN) | (events & selectors.EVENT_WRITE and select.EPOLLOUT)


def _from_epoll(found: int) -> int:
    """As `selectors` has it: an error or a hang-up wakes whoever waits, for either."""
    return (found & ~select.EPOLLIN and selectors.EVENT_WRITE) | (found & ~select.EPOLLOUT and selectors.EVENT_READ)
