"""The generations that one session owns, and the answers to its frontend's questions about generations."""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from services.core.call import Call, Cause, Phase
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, invalid
from services.core.generation.kept import ID_BYTES, LAST_EPOCH
from services.core.generation.presentation import PRESENTATION_BYTES_MAX
from services.core.interface import Delta
from services.core.request import FinishReason, Request
from services.core.validation import COUNT_MAX
from services.rpc.codec import logprobs_from_wire, seconds_from_wire
from services.stubs import worker_pb2
from services.worker.counters import Counters
from services.worker.execute import ATTACH
from services.worker.generations.generation import Generation, Spec
from services.worker.generations.store import GenerationStore
from services.worker.outbox import Outbox

REPLAY_WEIGHT_MAX = 16_384
"""How much of records, and of answers to questions, goes into one message, in tokens (`Delta.weight`)."""


class OwnedStream:
    """The owner of one generation: its tokens go to the outbox of a session.

    `replayed`: the position up to which an adopted record has been sent; None: all of it, so tokens are sent as they
    come. `outbox`: the session's; None while the record is sent. `is_stopped`: the frontend needs no more tokens.
    """

    __slots__ = ("_forget", "_has_ended", "_outbox", "generation", "id", "is_stopped", "outbox", "replayed")

    def __init__(self, stream_id: int, outbox: Outbox, forget: Callable[[int], None]) -> None:
        self.id = stream_id
        self.generation: Generation | None = None  # Set at once by its creator.
        self.replayed: int | None = None
        self.is_stopped = False
        self._has_ended = False
        self.outbox: Outbox | None = outbox
        self._outbox = outbox
        self._forget = forget

    def on_begun(self) -> None:
        self._outbox.add_begun(self.id)

    def on_tokens(self, delta: Delta) -> None:
        """Ignored: the record has them, and is being sent."""

    def on_ended(self, outcome: FinishReason | Failure) -> None:
        """Send the end, once the record has been sent. A failure ends the stream at once, unless it has ended."""
        if isinstance(outcome, Failure):
            if not self._has_ended:
                self._outbox.add_failure(self.id, outcome)
            self._forget(self.id)
        elif self.replayed is None:
            self._has_ended = True
            self._outbox.add_finish(self.id, outcome)

    def replay_from(self, position: int) -> None:
        """Send the record from there on, by `replay`, before the tokens that follow it."""
        self.replayed, self.outbox = position, None

    def replay(self, weight_max: int) -> int:
        """Send the next part of the record. Returns its weight."""
        assert self.generation is not None
        assert self.replayed is not None
        delta = self.generation.piece(self.replayed, weight_max)
        if delta.token_ids:
            self._outbox.add_tokens(self.id, delta)
            self.replayed += len(delta.token_ids)
        if self.replayed == self.generation.end:
            self.replayed, self.outbox = None, self._outbox
            if self.generation.outcome is not None:
                self.on_ended(self.generation.outcome)
        return delta.weight


class OwnedStreams:
    """The streams of one session whose generations outlive it, by stream id."""

    def __init__(
        self, store: GenerationStore, outbox: Outbox, counters: Counters, on_removed: Callable[[int], None]
    ) -> None:
        """`on_removed`: called with the id of each stream that is over, unless the frontend has cancelled it."""
        self._store = store
        self._outbox = outbox
        self._counters = counters
        self._on_removed = on_removed
        self._streams: dict[int, OwnedStream] = {}
        self._replays: dict[int, OwnedStream] = {}
        self._questions: deque[tuple[worker_pb2.Locate, int]] = deque()  # With the number of those cancelled.

    @property
    def question_count(self) -> int:
        """How many questions wait for their answers to be sent."""
        return len(self._questions)

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def submit(self, first_id: int, spec: Spec, request: Request, call: Call, count: int) -> None:
        """Start `count` choices, with stream ids from `first_id` on. `call`: without attempt, ending and group."""
        first = request.choice
        choice_group = ChoiceGroup(count, first) if count > 1 else None
        for number in range(count):
            stream = self._add(first_id + number)
            generation = Generation(spec, request, first + number, choice_group, stream)
            stream.generation = generation
            own_call = replace(
                call, endpoint=ATTACH, attempt=generation, ending=generation.ending, choice_group=choice_group
            )
            try:
                self._store.start(generation, replace(request, choice=first + number) if number else request, own_call)
            except Failure as failure:
                stream.on_ended(failure)

    def adopt(self, adopt: worker_pb2.Adopt) -> None:
        """Take a generation over, and send its record from its beginning."""
        stream = self._add(adopt.stream_id)
        try:
            _check_epoch(adopt.epoch)
            generation = self._store.adopt(adopt.generation_id, adopt.index, adopt.epoch, stream)
        except Failure as failure:
            stream.on_ended(failure)
            return
        stream.generation = generation
        stream.replay_from(generation.spec.base)
        if generation.has_begun:
            stream.on_begun()
        if isinstance(generation.outcome, Failure):
            stream.on_ended(generation.outcome)
            self._store.drop(generation, Cause.INTERNAL)  # It has ended.
        else:
            self._replays[stream.id] = stream

    def locate(self, locate: worker_pb2.Locate) -> None:
        """Take a question about an answer's generations. `pull` answers it."""
        cancelled = self._store.cancel(locate.generation_id) if locate.cancels else 0
        self._questions.append((locate, cancelled))

    def _located(self, locate: worker_pb2.Locate, cancelled: int) -> worker_pb2.Located:
        found = self._store.locate(locate.generation_id)
        holdings = [
            worker_pb2.Holding(
                index=one.index,
                token_count=one.token_count,
                epoch=one.epoch,
                is_finished=isinstance(one.outcome, FinishReason),
                has_failed=isinstance(one.outcome, Failure),
                continuation=one.spec.continuation,
            )
            for one in found
        ]
        return worker_pb2.Located(
            query=locate.query,
            holdings=holdings,
            presentation=found[0].spec.presentation if found else b"",
            is_expired=not found and self._store.is_expired(locate.generation_id),
            cancelled=cancelled,
        )

    def cancel(self, stream_id: int) -> None:
        """The frontend gives the stream up: stop the engine and drop the record."""
        if (stream := self._streams.get(stream_id)) is not None and stream.generation is not None:
            self._count_signal(stream, stream.generation)
            self._store.drop(stream.generation, Cause.SIGNAL)
            self._replays.pop(stream_id, None)
            del self._streams[stream_id]  # It has been counted, and no further cancel will come.

    def stop(self, stream_id: int) -> None:
        """The frontend needs no more tokens."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.generation is not None:
            self._count_signal(stream, stream.generation)
            stream.is_stopped = True
            stream.generation.stop()
            self._replays.pop(stream_id, None)

    def detach(self, stream_id: int) -> None:
        """The frontend lets go of the stream."""
        if (stream := self._streams.get(stream_id)) is not None and stream.generation is not None:
            self._store.let_go(stream.generation, stream)
            self._remove(stream_id)

    def detach_all(self) -> None:
        """The session is over."""
        for stream_id in list(self._streams):
            self.detach(stream_id)

    def pull(self) -> None:
        """Put the next answers to questions and the next parts of adopted records into the outbox, if there are any.

        They take up to REPLAY_WEIGHT_MAX, and one answer or token more. Call it while the frontend reads.
        """
        weight = 0
        while self._questions and weight < REPLAY_WEIGHT_MAX:
            weight += self._outbox.add_located(self._located(*self._questions.popleft()))
        for stream in list(self._replays.values()):
            if weight >= REPLAY_WEIGHT_MAX:
                return
            weight += stream.replay(REPLAY_WEIGHT_MAX - weight)
            if stream.replayed is None:
                self._replays.pop(stream.id, None)

    def _add(self, stream_id: int) -> OwnedStream:
        stream = self._streams[stream_id] = OwnedStream(stream_id, self._outbox, self._remove)
        return stream

    def _remove(self, stream_id: int) -> None:
        self._replays.pop(stream_id, None)
        del self._streams[stream_id]
        self._on_removed(stream_id)

    def _count_signal(self, stream: OwnedStream, generation: Generation) -> None:
        if not stream.is_stopped:
            phase = generation.phase if generation.outcome is None else Phase.ENDED
            self._counters.cancelled[Cause.SIGNAL, phase] += 1


def spec_of(message: worker_pb2.Generation, request: Request, count: int) -> Spec:
    """What a submit of `count` choices says of its generation. Raises INVALID_ARGUMENT if that cannot be kept."""
    prior_count = 0 if request.logprobs is None else len(request.generated_token_ids) - message.base
    grace_s = seconds_from_wire(message.grace)
    if len(message.id) != ID_BYTES:
        raise invalid("generation.id", f"generation.id must have {ID_BYTES} bytes, not {len(message.id)}")
    if message.base > len(request.generated_token_ids):
        raise invalid("generation.base", "generation.base must be at most the number of generated_token_ids")
    if message.index + count - 1 > COUNT_MAX:
        raise invalid("generation.index", f"generation.index of the last choice must be at most {COUNT_MAX}")
    _check_epoch(message.epoch)
    if grace_s < 0:
        raise invalid("generation.grace", "generation.grace must not be negative")
    if len(message.presentation) > PRESENTATION_BYTES_MAX:
        raise invalid("generation.presentation", f"generation.presentation exceeds {PRESENTATION_BYTES_MAX} bytes")
    if len(message.prior_logprobs) != prior_count:
        detail = f"generation.prior_logprobs must have {prior_count} items, not {len(message.prior_logprobs)}"
        raise invalid("generation.prior_logprobs", detail)
    return Spec(
        id=message.id,
        index=message.index,
        base=message.base,
        epoch=message.epoch,
        grace_s=grace_s,
        presentation=message.presentation,
        prior_logprobs=tuple(map(logprobs_from_wire, message.prior_logprobs)) if message.prior_logprobs else (),
        continuation=message.continuation,
    )


def _check_epoch(epoch: int) -> None:
    """Raise INVALID_ARGUMENT for an epoch after which there is no room for later ones."""
    if epoch > LAST_EPOCH:
        raise invalid("epoch", f"the epoch of a generation must be at most {LAST_EPOCH}")
