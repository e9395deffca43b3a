"""The engine's thread: requests wait in an unbounded queue, run in a batch, and get one token in each step."""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from random import Random
from typing import Protocol

from ..executor.request import GenerationRequest, Logprob, Response
from ..executor.utils import CppExecutorError
from ..llmapi.llm_args import TorchLlmArgs
from .choice import Answer, Choice, DeadEndError
from .faults import Death, Faults
from .guided import CompilerCrashError, GuideBuilder
from .kv_cache import KvCache
from .model import Model, State
from .rank import Rank, candidate_ranks
from .stats import iteration_stats
from .work import WorkFile

BATCH_SIZE_MAX = 2048
"""The default of max_batch_size."""
STATS_MAX = 1000
"""The default of iter_stats_max_iterations: iterations whose statistics are kept for a reader."""


class Parent(Protocol):
    """The process that started the engine. All methods are called in the engine's thread."""

    def dispatch(self, responses: Sequence[Response]) -> None:
        """Receive the responses of one step."""
        ...

    def fail(self, error: Exception) -> None:
        """The engine is dead."""
        ...

    def report(self, stats: Sequence[str], events: Sequence[str]) -> None:
        """Receive statistics and cache events, each in JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel, sent through the same queue as the requests."""

    id: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Ends all requests and the thread."""


class Engine(threading.Thread):
    """The engine. It reads requests, cancels and the end from `inbox`."""

    def __init__(self, args: TorchLlmArgs, model: Model, faults: Faults, parent: Parent) -> None:
        super().__init__(name="tensorrt_llm_fake_engine", daemon=True)
        self.inbox: SimpleQueue[GenerationRequest | Cancel | Quit] = SimpleQueue()
        self._args = args
        self._model = model
        self._faults = faults
        self._parent = parent
        self._step_count = 0
        self._random = Random(0)
        self._context_length = args.max_seq_len or model.vocabulary.context_length
        self._guides = GuideBuilder(model.vocabulary, args.guided_decoding_backend or "")
        self._waiting: deque[Choice] = deque()
        self._ranks = make_ranks(args, self._context_length)
        self._stats: deque[str] = deque(maxlen=args.iter_stats_max_iterations or STATS_MAX)
        self._work = WorkFile(faults.work_file)
        self._report_at = 0.0
        self._is_over = False

    def run(self) -> None:
        while not self._is_over:
            self._read_messages()
            self._admit()
            if self._active:
                time.sleep(self._faults.step_ms / 1000)
                self._step()
            self._report()
        self._parent.dispatch([choice.response(self._step_count, ("cancelled", None, 0)) for choice in self._active])

    @property
    def _active(self) -> list[Choice]:
        return [choice for rank in self._ranks for choice in rank.active]

    def _read_messages(self) -> None:
        """Handle all messages in the inbox. Waits for one if the engine has nothing to do."""
        is_idle = not (self._active or self._waiting)
        timeout = max(0.0, self._report_at - time.monotonic()) if self._stats else None
        while not self._is_over:
            try:
                message = self.inbox.get(block=is_idle, timeout=timeout)
            except Empty:
                return
            is_idle = False
            match message:
                case Quit():
                    self._is_over = True
                case Cancel(request_id):
                    self._cancel(request_id)
                case GenerationRequest():
                    self._accept(message)

    def _accept(self, request: GenerationRequest) -> None:
        try:
            self._waiting += self._choices(request)
        except CompilerCrashError:
            self._die()
        except (RuntimeError, ValueError) as error:
            self._parent.dispatch([Response(id=request.id, error=str(error))])

    def _choices(self, request: GenerationRequest) -> list[Choice]:
        """Create the answers of a request. Raises RuntimeError or ValueError, which fail only this request."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        room = self._context_length - len(prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit max_seq_len {self._context_length}")
        validate_request(request, len(self._model.vocabulary.token_bytes), len(self._ranks))
        count = params.best_of or params.n
        answer = Answer(request=request, max_tokens=min(params.max_tokens or room, room), open_count=count)
        cache = self._ranks[0].cache
        if cache.blocks_of(len(prompt) + answer.max_tokens) > cache.block_count:
            raise ValueError("the request needs more key-value cache than there is")
        if self._faults.error_token in prompt:
            answer.error_after = self._faults.error_after
        if self._faults.lost_token in prompt:
            answer.lost_after = self._faults.lost_after
        state, stops = State().after(prompt), params._stops()
        choices = [Choice(answer, index, state, len(prompt), stops) for index in range(count)]
        if params.guided_decoding is not None:
            if self._args.guided_decoding_backend is None:
                raise ValueError("guided decoding is not enabled")
            for choice in choices:
                choice.guide = self._guides.build(params.guided_decoding)
        return choices

    def _cancel(self, request_id: int) -> None:
        """Cancel a request. A waiting one is removed without any response; a running one ends some steps later."""
        self._waiting = deque(one for one in self._waiting if one.answer.request.id != request_id)
        for choice in self._active:
            if choice.answer.request.id == request_id and choice.answer.cancel_at is None:
                choice.answer.cancel_at = self._step_count + self._faults.cancel_steps

    def _admit(self) -> None:
        """Admit answers in order of arrival. With several ranks, an answer that waits for its rank lets others pass."""
        refused: deque[Choice] = deque()
        while self._waiting and (not refused or len(self._ranks) > 1):
            choice = self._waiting.popleft()
            if not any(rank.admit(choice) for rank in candidate_ranks(choice, self._ranks)):
                refused.append(choice)
        self._waiting.extendleft(reversed(refused))

    def _step(self) -> None:
        """Run one step of all ranks."""
        self._step_count += 1
        start = time.monotonic()
        responses: list[Response] = []
        try:
            read_counts = [self._step_rank(rank, responses) for rank in self._ranks]
        except DeadEndError:
            self._die()
            return
        self._work.write()
        if self._args.enable_iter_perf_stats:
            latency_ms = self._faults.step_ms + 1000 * (time.monotonic() - start)
            rank, queued_count = self._ranks[0], len(self._waiting)
            stats = iteration_stats(self._step_count, rank, queued_count, latency_ms, read_counts[0])
            self._stats.append(json.dumps(stats))
        if self._is_to_die():
            self._die()
        else:
            self._parent.dispatch(responses)

    def _step_rank(self, rank: Rank, responses: list[Response]) -> int:
        """Compute prompts, up to the token budget of the step, and draw tokens. Returns the prompt tokens computed.

        Aborted answers end here, even in the middle of their prompt.
        """
        read_count, kept = 0, []
        budget = (self._args.max_num_tokens or self._context_length) - len(rank.active)
        for choice in rank.active:
            if self._is_cancelled(choice):
                responses.append(choice.response(self._step_count, ("cancelled", None, 0)))
                continue
            read = min(choice.prefill_left, max(budget, 1))
            choice.prefill_left -= read
            budget -= read
            read_count += read
            if choice.prefill_left > 0 or self._advance(choice, responses):
                kept.append(choice)
        rank.keep(kept)
        self._work.read_count += read_count
        return read_count

    def _is_cancelled(self, choice: Choice) -> bool:
        return choice.answer.cancel_at is not None and choice.answer.cancel_at <= self._step_count

    def _advance(self, choice: Choice, responses: list[Response]) -> bool:
        """Draw a token or end the answer. Returns whether the answer continues."""
        answer = choice.answer
        if answer.error_after is not None and answer.error_after <= len(choice.generated):
            responses.append(Response(id=answer.request.id, error="the marked request failed"))
            return False
        token = choice.draw(self._model, self._random)
        self._work.drawn_count += 1
        if choice.unsent_logprobs and not self._faults.drawn_in_logprobs:
            drop_drawn(choice.unsent_logprobs[-1], choice.params.logprobs or 0)
        end = choice.end(token)
        if end is not None and token == choice.params.end_id and not self._faults.end_in_tokens:
            choice.unsent.pop()
            choice.unsent_logprobs = choice.unsent_logprobs[: len(choice.unsent)]
        count = len(choice.generated)
        is_due = count == 1 or count % self._args.stream_interval == 0
        is_lost = answer.lost_after is not None and count > answer.lost_after
        if not is_lost and (end is not None or (answer.request.streaming and is_due)):
            responses.append(choice.response(self._step_count, end))
        return end is None

    def _report(self) -> None:
        """Report events at once, and statistics at intervals."""
        events = [json.dumps(event) for rank in self._ranks for event in rank.cache.drain_events()]
        stats: list[str] = []
        if time.monotonic() >= self._report_at:
            stats = list(self._stats)
            self._stats.clear()
            self._report_at = time.monotonic() + self._faults.stats_ms / 1000
        if stats or events:
            self._parent.report(stats, events)

    def _is_to_die(self) -> bool:
        if self._step_count == self._faults.death_steps:
            return True
        marker = self._faults.death_token
        return any(marker in one.answer.request.prompt_token_ids and not one.prefill_left for one in self._active)

    def _die(self) -> None:
        """Stop working; only a Quit message ends the thread."""
        if self._faults.death is not Death.SILENT:
            self._parent.fail(CppExecutorError("the engine died"))
        if self._faults.death is Death.RAISED:
            self._parent.dispatch([choice.response(self._step_count) for choice in self._active])
        for rank in self._ranks:
            rank.active = []
        while not isinstance(self.inbox.get(), Quit):
            pass
        self._is_over = True


def drop_drawn(logprobs: dict[int, Logprob], count: int) -> None:
    """Remove the drawn token unless it is among the `count` likeliest."""
    for token in list(logprobs)[count:]:
        del logprobs[token]


def make_ranks(args: TorchLlmArgs, context_length: int) -> list[Rank]:
    """Create the ranks. Without `max_tokens` in its configuration, the cache holds a full context for every slot."""
    config, batch_size = args.kv_cache_config, args.max_batch_size or BATCH_SIZE_MAX
    if config.max_tokens is None:
        block_count = batch_size * -(-context_length // config.tokens_per_block)
    else:
        block_count = config.max_tokens // config.tokens_per_block
    if not args.enable_attention_dp:
        return [Rank(0, batch_size, KvCache(config, block_count, None))]
    indices = range(args.tensor_parallel_size)
    return [Rank(index, batch_size, KvCache(config, block_count, index)) for index in indices]


def validate_request(request: GenerationRequest, vocab_size: int, rank_count: int) -> None:
    """The engine's own checks. Raises ValueError."""
    params, scheduling = request.sampling_params, request.scheduling_params
    if any(not 0 <= token < vocab_size for token in request.prompt_token_ids):
        raise ValueError("token id out of range")
    if params.temperature is not None and params.temperature < 0:
        raise ValueError(f"temperature: {params.temperature}")
    if params.top_p is not None and not 0 <= params.top_p <= 1:
        raise ValueError(f"top_p: {params.top_p}")
    if params.top_k is not None and params.top_k < 0:
        raise ValueError(f"top_k: {params.top_k}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ValueError(f"max_tokens: {params.max_tokens}")
    if params.embedding_bias is not None and len(params.embedding_bias.tolist()) != vocab_size:
        raise ValueError("embedding_bias: one number for each token of the vocabulary")
    rank = None if scheduling is None or rank_count == 1 else scheduling.attention_dp_rank
    if rank is not None and not 0 <= rank < rank_count:
        raise ValueError(f"attention_dp_rank: {rank}")
