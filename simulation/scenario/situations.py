"""Situations that a campaign must have reached: rare meetings of events, for which the plane has code of its own.

Each is a condition on the calls of one function of the product. A campaign in which one of them never happened has not
tested the code behind it, so it fails.
"""

from collections.abc import Callable
from typing import Any

from services.core.errors import Failure, Reason
from services.core.interface import Finish
from services.frontend.migration.policy import Verdict
from simulation.scenario.watching import Watched

_FRONTEND = "services.frontend"
_MIGRATION = f"{_FRONTEND}.migration.migration:Migration"
_TABLE = f"{_FRONTEND}.session.stream_table:StreamTable"
_STORE = "services.worker.generations.store:GenerationStore"
_SSE = f"{_FRONTEND}.api.openai.sse.stream:SseStream"


def _always(*_: Any) -> bool:
    return True


def _fails(reason: Reason) -> Callable[..., bool]:
    return lambda outcome, *_: isinstance(outcome, Failure) and outcome.reason is reason


def _returns(*values: Any) -> Callable[..., bool]:
    return lambda outcome, *_: any(outcome is value for value in values)


SITUATIONS = (
    # Moves
    Watched(
        "a stream moves before its first token", f"{_MIGRATION}._begin_move", lambda _, m, *a: m._record.count == 0
    ),
    Watched("a stream moves after some tokens", f"{_MIGRATION}._begin_move", lambda _, m, *a: m._record.count > 0),
    Watched(
        "a stream moves again before the move has brought a token",
        f"{_MIGRATION}._begin_move",
        lambda _, m, *a: m._move is not None,
        before=True,
    ),
    Watched(
        "a worker fails while a second attempt is prepared",
        f"{_MIGRATION}._move_on",
        lambda _, m, *a: m._second is not None,
        before=True,
    ),
    Watched(
        "a second attempt takes over",
        f"{_MIGRATION}._try_take_over",
        _returns(True),
    ),
    Watched(
        "a stream ends while a second attempt is prepared",
        f"{_MIGRATION}._run_attempts",
        lambda outcome, m: isinstance(outcome, Finish) and m._second is not None,
    ),
    Watched(
        "a second attempt is too far behind and starts again",
        "services.frontend.migration.migration:judge_second",
        _returns(Verdict.START_AGAIN),
    ),
    Watched(
        "a second attempt repeats tokens that the client has", "services.frontend.migration.migration:_skip", _always
    ),
    Watched(
        "a second attempt fails without a token",
        f"{_MIGRATION}._on_second_ended",
        lambda _, m, a: isinstance(a.outcome, Failure),
    ),
    Watched(
        "a stream waits for a worker that replaces its own",
        f"{_FRONTEND}.layers.route:Route._wait_for_room",
        lambda outcome, r, s, request, call: (
            not isinstance(outcome, BaseException) and call.replacement_deadline is not None
        ),
    ),
    Watched(
        "no worker replaces that of a stream in time",
        f"{_FRONTEND}.layers.route:Route._wait_for_room",
        _fails(Reason.NO_WORKERS),
    ),
    Watched(
        "a stream gives up after its moves", f"{_MIGRATION}._move_on", lambda outcome, *_: isinstance(outcome, Failure)
    ),
    Watched("a request is poison", f"{_MIGRATION}._move_on", _fails(Reason.POISON_REQUEST)),
    Watched("choices that were refused go on together", "services.core.choice_group:ChoiceGroup.renew", _always),
    Watched("a choice that was reserved never comes", f"{_TABLE}._give_back", _always),
    # Sessions
    Watched(
        "a session breaks while streams are open", f"{_TABLE}.fail_all", lambda _, t, *a: len(t._open) > 0, before=True
    ),
    Watched(
        "tokens come after their stream was closed", f"{_TABLE}.on_step", lambda _, t, *a: t._cancels.late_tokens > 0
    ),
    Watched(
        "steps of a worker are merged",
        "services.frontend.session.coalesce:_Group.merged",
        lambda _, g: len(g._messages) > 1,
    ),
    Watched(
        "a worker says that it leaves while streams are open", f"{_TABLE}.on_goaway", lambda _, t, *a: len(t._open) > 0
    ),
    Watched(
        "a frontend reads its session late",
        "services.worker.outbox:Outbox.add_tokens",
        lambda _, o, stream_id, *a: stream_id in o._entries,
        before=True,
    ),
    # Answers that outlive their client
    Watched("a frontend lets go of a running stream", f"{_TABLE}.let_go", lambda _, t, s: s.ended.cancelled()),
    Watched("a record that is not needed is discarded", f"{_TABLE}.discard", _always),
    Watched(
        "a frontend adopts an answer that runs",
        f"{_TABLE}.adopt",
        lambda outcome, t, request, call, *a: call.attempt.adopts is not None and not call.attempt.adopts.is_over,
    ),
    Watched(
        "a frontend adopts an answer that is over",
        f"{_TABLE}.adopt",
        lambda outcome, t, request, call, *a: call.attempt.adopts is not None and call.attempt.adopts.is_over,
    ),
    Watched(
        "an answer is taken from its owner",
        "services.worker.generations.generation:Generation.adopt",
        lambda _, g, owner, epoch: type(g.owner).__name__ == "OwnedStream",
        before=True,
    ),
    Watched(
        "an answer is taken by an older epoch",
        "services.worker.generations.generation:Generation.adopt",
        _fails(Reason.TAKEN_OVER),
    ),
    Watched(
        "a record is replaced by a stream with the same id",
        f"{_STORE}._take_away",
        lambda _, s, g, cause, *a: cause.name == "REPLACED",
    ),
    Watched("the grace of an answer is over", f"{_STORE}._expire", _always),
    Watched(
        "an answer is cancelled while nobody reads it",
        f"{_STORE}.cancel",
        lambda outcome, *a: not isinstance(outcome, BaseException) and outcome > 0,
    ),
    Watched(
        "several workers have the same answer",
        f"{_FRONTEND}.resume.finder:GenerationFinder._resumed",
        lambda _, f, i, tenant, holders: len(holders) > 1,
    ),
    Watched(
        "an answer is not found", f"{_FRONTEND}.resume.finder:GenerationFinder.find", _fails(Reason.STREAM_NOT_FOUND)
    ),
    Watched(
        "an answer is not found by its tenant, or by another one",
        f"{_FRONTEND}.resume.finder:GenerationFinder.find",
        lambda outcome, f, i, tenant: bool(tenant.name) and isinstance(outcome, Failure),
    ),
    Watched("an answer has expired", f"{_FRONTEND}.resume.finder:GenerationFinder.find", _fails(Reason.STREAM_EXPIRED)),
    Watched(
        "a worker that may have the answer is away",
        f"{_FRONTEND}.resume.finder:GenerationFinder.find",
        _fails(Reason.NO_WORKERS),
    ),
    # Admission
    Watched(
        "a request waits for a slot",
        "services.worker.dispatcher:Dispatcher.admit",
        lambda _, d, *a: d.waiting_count > 0,
    ),
    Watched(
        "a worker refuses for want of room",
        "services.worker.dispatcher:Dispatcher.admit",
        _fails(Reason.WORKER_AT_CAPACITY),
    ),
    Watched(
        "a request is refused on its way to a worker with room no more",
        f"{_FRONTEND}.layers.route:Route._on_failure",
        lambda _, r, worker, failure, *a: failure.reason is Reason.WORKER_AT_CAPACITY,
    ),
    Watched("a waiting request waits too long", "services.worker.execute:Execute._end_waiting", _always),
    Watched("a request comes while the process drains", "services.core.gate:Gate.enter", _fails(Reason.DRAINING)),
    Watched(
        "streams are left at the end of a drain",
        "services.core.gate:Gate.fail_all",
        lambda _, g, *a: g.count > 0,
        before=True,
    ),
    Watched(
        "a worker hands its requests over",
        "services.worker.execute:Execute.fail_all",
        lambda _, e, *a: e.running_count > 0,
        before=True,
    ),
    # Clients
    Watched("a client over HTTP becomes slow", f"{_SSE}._become_slow", _always),
    Watched("a client over HTTP has left", f"{_SSE}._leave_gone", _always),
    Watched("a message over gRPC waits for its client", "services.http.h2.stream:SendingHalf._send_later", _always),
    Watched("a client over HTTP leaves more unread than it may", f"{_SSE}._leave_slow", _always),
    # The registry
    Watched("a worker's lease lapses", "services.registry.memory_store:MemoryStore._lapse", _always),
    Watched(
        "a worker registers again",
        "services.discovery.registrar:Registrar._register",
        lambda outcome, *a: isinstance(outcome, BaseException),
    ),
    Watched(
        "a frontend gets a snapshot after the registry was away",
        "services.discovery.watcher:Watcher._apply",
        lambda _, w, response: response.snapshot and w.is_synced,
        before=True,
    ),
)
