"""Faults that are planted into the product, one at a time, to see that a campaign finds them.

Each replaces a piece of the source of one module, as it is imported. All are of order or of time: on an undisturbed
plane nobody would notice them.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Plant:
    """`module`: whose source has `old`, once, which `new` replaces."""

    name: str
    module: str
    old: str
    new: str


PLANTS = (
    Plant(
        "an epoch is not checked when an answer is adopted",
        "services.worker.generations.generation",
        "if epoch <= self.epoch:\n            raise taken_over()",
        "",
    ),
    Plant(
        "the former owner of an answer is not told that it was taken",
        "services.worker.generations.generation",
        "former.on_ended(taken_over())",
        "del former",
    ),
    Plant(
        "the timer of an answer runs on when it has an owner again",
        "services.worker.generations.generation",
        "former, self.owner, self.epoch = self.owner, owner, epoch\n        self.stop_timer()",
        "former, self.owner, self.epoch = self.owner, owner, epoch",
    ),
    Plant(
        "a stream that is closed is not cancelled at its worker",
        "services.frontend.session.stream_table",
        "if self._remove(stream, frees_room=True) or (has_record and stream.is_complete):\n            self._writer",
        "if self._remove(stream, frees_room=True) and has_record:\n            self._writer",
    ),
    Plant(
        "a stream that is reserved for a choice that never comes is not closed",
        "services.frontend.session.stream_table",
        "ended.exception()  # Or asyncio would report it as never retrieved.\n        self.close(stream)",
        "ended.exception()",
    ),
    Plant(
        "tokens that the client has come again after a move",
        "services.frontend.migration.migration",
        "self._record.deliver(_skip(delta, known) if known else delta)",
        "self._record.position -= known\n            self._record.deliver(delta)",
    ),
    Plant(
        "a choice that moves alone stays in its group",
        "services.frontend.migration.migration",
        "choice_group.leave(self._request.choice)",
        "pass",
    ),
    Plant(
        "the first attempt is not cancelled when the second takes over",
        "services.frontend.migration.migration",
        "self._current.cancel()\n        self._make_current(attempt)",
        "self._make_current(attempt)",
    ),
    Plant(
        "a worker has one place more than it says",
        "services.worker.dispatcher",
        "missing_places = left - (limits.places - len(self._waiting))",
        "missing_places = left - (limits.places + 1 - len(self._waiting))",
    ),
    Plant(
        "the log probabilities of merged steps are lost",
        "services.rpc.step",
        "logprobs.setdefault(step.stream_ids[entry], Columns()).extend(one)",
        "logprobs[step.stream_ids[entry]] = one",
    ),
    Plant(
        "a frame that comes in pieces loses its first one",
        "services.rpc.framing",
        "self._unread, self._unread_min = bytearray(data[start:]), size",
        "self._unread, self._unread_min = bytearray(), size",
    ),
    Plant(
        "a message overtakes those that wait for the client",
        "services.http.h2.stream",
        "size, writer = len(message) + MESSAGE_PREFIX_BYTES, self._writer\n        if self._pending or",
        "size, writer = len(message) + MESSAGE_PREFIX_BYTES, self._writer\n        if",
    ),
    Plant(
        "an instance that left while the registry was away is kept",
        "services.discovery.watcher",
        "if response.snapshot else response.deleted",
        "if response.snapshot and not was_synced else response.deleted",
    ),
    Plant(
        "a worker does not register again after its registry was away",
        "services.discovery.client",
        "outage.begin(address, _why(error))",
        "return",
    ),
    Plant(
        "the text of tokens is decoded anew after a resume, not after what the client has",
        "services.frontend.layers.detokenize",
        "detokenizer.prime(request.generated_token_ids)",
        "detokenizer.token_count = len(request.generated_token_ids)",
    ),
    Plant(
        "the tokens of a resumed answer are counted twice",
        "services.frontend.layers.detokenize",
        "self.token_count = len(token_ids)\n        if self._stops is None:",
        "self.token_count = 2 * len(token_ids)\n        if self._stops is None:",
    ),
    Plant(
        "a request that is refused while the process drains is counted as inside",
        "services.core.gate",
        "if self.is_draining:\n            raise draining()",
        "if self.is_draining:\n            self._inside[call.tenant.name, call.request_id] = call.ending\n"
        "            raise draining()",
    ),
    Plant(
        "the engine goes on with a request that has left",
        "services.worker.execute",
        "if active.was_submitted:\n                self._engine.cancel(key)",
        "if active.was_submitted and active.has_tokens:\n                self._engine.cancel(key)",
    ),
    Plant(
        "the end of an adopted stream is sent before its adoption",
        "services.frontend.session.writer",
        "if self._has_adopts:\n            self._begin_message()\n        self._send_soon()",
        "self._send_soon()",
    ),
    Plant(
        "an answer that has ended for its owner ends again when it is taken",
        "services.worker.generations.owned",
        "if not self._has_ended:\n                self._outbox.add_failure(self.id, outcome)",
        "self._outbox.add_failure(self.id, outcome)",
    ),
    Plant(
        "a worker is taken for the one that had its address before",
        "services.frontend.session.session",
        "if (other := message.welcome.instance_id) != self.record.instance_id:",
        "if not (other := message.welcome.instance_id):",
    ),
    Plant(
        "a worker that was idle is taken for silent at once",
        "services.frontend.session.session",
        "if was_idle and self._streams.has_unfinished:",
        "if was_idle and not self._streams.has_unfinished:",
    ),
    Plant(
        "a second attempt runs on when its request has ended",
        "services.frontend.migration.migration",
        "if self._tasks is not None:\n                    await self._tasks.end()",
        "pass",
    ),
    Plant(
        "a worker closes its sessions before its frontends have hung up",
        "services.worker.service",
        "if not await wait_event(self._has_no_session, timeout_s):",
        "if not await wait_event(self._has_no_session, 0):",
    ),
    Plant(
        "a stream that a frontend lets go of counts on",
        "services.frontend.session.stream_table",
        "self._remove(stream, frees_room=False)  # Its request goes on.",
        "self._open.pop(stream.id, None)",
    ),
    Plant(
        "a waiter that finds no room does not wake those behind it",
        "services.frontend.routing.wait_queue",
        "if waiter.is_woken:\n                self.wake_next()",
        "",
    ),
    Plant(
        "a frontend says that an answer is unknown before it knows all workers",
        "services.frontend.resume.finder",
        "if not (is_complete and self._sessions.has_all):",
        "if not is_complete:",
    ),
    Plant(
        "a request that is cancelled while it ends counts as finished",
        "services.core.common_layers",
        "if ending.failure is not None:  # Even",
        "if finish is None:  # Even",
    ),
    Plant(
        "a client over HTTP may leave any amount unread",
        "services.frontend.api.openai.sse.backlog",
        "if self._exchange.unsent_size() + self._buffer.size > bytes_max:",
        "if False:",
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with a planted fault."""

    plant: Plant

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        source = self.get_data(self.path).decode()
        assert source.count(self.plant.old) == 1, f"{self.plant.name}: its place is not in {fullname} once"
        return compile(source.replace(self.plant.old, self.plant.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._plant.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(fullname, found.origin)
        loader.plant = self._plant
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def plant(number: int) -> Plant:
    """Plant a fault. Call it before `services` is imported. Returns it."""
    assert not any(name.startswith("services.") for name in sys.modules), "services is imported already"
    sys.meta_path.insert(0, _Finder(PLANTS[number]))
    return PLANTS[number]
