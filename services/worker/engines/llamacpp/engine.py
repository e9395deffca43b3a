"""The llama.cpp engine on the event loop: one thread steps, a mailbox leads to it, and each step sends outputs back."""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import Request
from services.isolation.losses import Loss
from services.runtime.process import StartupError
from services.runtime.tasks import TaskSet, wait_event
from services.worker.engine import Emit, EngineLoad, Output, RankLoad
from services.worker.guided.guide import Guide
from services.worker.guided.guide_jobs import encode_vocabulary
from services.worker.guided.guides import KINDS, Guides, check_installed, guide_pool

try:
    from services.models.tokenizers.gguf import tokenizer_content
    from services.worker.engines.llamacpp.batch import CHUNK_TOKENS_MAX, CHUNK_TOKENS_MIN, Batch
    from services.worker.engines.llamacpp.mailbox import Mailbox
    from services.worker.engines.llamacpp.model import Llama
    from services.worker.engines.llamacpp.sequence import LlamaSequence, blocks_of
except (ImportError, Failure) as error:
    raise StartupError("the llamacpp engine needs llama.cpp: pip install 'unbroken[llamacpp]'") from error

check_installed()
log = structlog.get_logger()

END_TIMEOUT_S = 10.0
"""How long a shutdown waits for the step, or the loading, in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppConfig:
    """Settings of the llama.cpp engine.

    `context_length`: tokens of prompt and answer of one sequence, at most the model's own; None: at most 2048.
    `sequences`: how many run at a time. `threads`: a second thread is faster only on a core of its own, and adds a
    filler row to each step of a single sequence. `prefill_chunk_tokens`: prompt tokens computed in one step, between
    two tokens of the other sequences.
    """

    path: Path
    served_model_name: str
    sequences: int = 4
    context_length: int | None = None
    threads: int = 1
    prefill_chunk_tokens: int = 16

    def __post_init__(self) -> None:
        assert self.sequences >= 1
        assert CHUNK_TOKENS_MIN <= self.prefill_chunk_tokens <= CHUNK_TOKENS_MAX


class LlamaCppEngine:
    """Serves a GGUF model. The package docstring explains what makes its answers exact."""

    def __init__(self, config: LlamaCppConfig) -> None:
        self._config = config
        self._mailbox = Mailbox()
        self._live: dict[int, LlamaSequence] = {}  # By key: requests that may emit. Only the event loop changes it.
        self._guiding: dict[int, Callable[[], object]] = {}  # By key: ends the task that guides the answer.
        self._loaded: tuple[Llama, ModelCard, bytes] | None = None
        self._batch: Batch | None = None
        self._guides: Guides | None = None
        self._helpers_lost: Counter[Loss] = Counter()
        self._tasks = TaskSet(on_bug=lambda: self._fail(self._tasks.bug))
        self._died: asyncio.Future[None] | None = None
        self._emit: Emit = lambda _: None
        self.request_limit = config.sequences

    @property
    def card(self) -> ModelCard:
        return self._get_loaded()[1]

    def tokenizer_content(self) -> bytes:
        return self._get_loaded()[2]

    def load(self) -> EngineLoad:
        """The load of all requests that were submitted and have neither ended nor been cancelled.

        `kv_blocks_total` is the number of blocks that N sequences with a full context take. llama.cpp rounds each
        sequence's cache up to 256 tokens; no request can fill that padding, so it is not counted.
        """
        if self._batch is None:
            return EngineLoad(0, (RankLoad(0, 0, 0),))
        used = sum(sequence.block_count for sequence in self._live.values())
        total = self.request_limit * blocks_of(self.card.context_length)
        prefill = sum(sequence.prefill_left for sequence in self._live.values())
        ranks = (RankLoad(used, total, prefill),)
        return replace(self._batch.counts, ranks=ranks, helpers_lost=self._helpers_lost)

    def _count_lost(self, loss: Loss) -> None:
        self._helpers_lost[loss] += 1

    def submit(self, key: int, request: Request) -> None:
        _check(request, self.card)
        if len(self._live) >= self.request_limit:
            detail = "Server overloaded: worker at capacity"
            raise Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.CAPACITY})
        sequence = LlamaSequence(key, request, self._get_loaded()[0].end_ids)
        if request.guided is None:
            self._mailbox.submit(sequence)
        else:
            self._guiding[key] = self._tasks.start(self._guide(sequence))
        self._live[key] = sequence

    async def _guide(self, sequence: LlamaSequence) -> None:
        """Guide an answer until it ends. The engine's thread gets the request once its grammar is compiled."""
        assert self._guides is not None, "the engine is not ready"

        def begin(guide: Guide) -> None:
            sequence.guide = guide
            self._mailbox.submit(sequence)

        try:
            await self._guides.serve(sequence.request, begin)
        except Failure as failure:
            self._deliver([Output(sequence.key, failure=failure)])

    def cancel(self, key: int) -> None:
        sequence = self._live.pop(key, None)
        if sequence is None:
            return
        self._end_guiding(key)
        if sequence.request.guided is None or sequence.guide is not None:
            self._mailbox.cancel(key)

    def _end_guiding(self, key: int) -> None:
        if (end := self._guiding.pop(key, None)) is not None:
            end()

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """Load the model, set `ready`, and step until cancelled. Raises Failure(ENGINE_DEAD) when either fails.

        cyllama holds the GIL while it reads a file, so loading also blocks the event loop: up to 0.7 s for 100 MB. No
        request waits then, because a worker registers and accepts sessions only once `ready` is set.
        """
        self._emit = emit
        loop = asyncio.get_running_loop()
        died = self._died = loop.create_future()
        ended = asyncio.Event()

        def call_on_loop(callback: Callable[..., object], *args: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *args)

        def start(vocabulary: bytes) -> None:
            self._guides = Guides(guide_pool(vocabulary, self.request_limit, self._count_lost), call_on_loop)
            self._tasks.start(self._guides.load())
            ready.set()

        def work() -> None:
            try:
                self._work(
                    lambda content: call_on_loop(start, content), lambda outputs: call_on_loop(self._deliver, outputs)
                )
            except BaseException as error:  # A panic in Rust does not derive from Exception.
                log.exception("the engine thread failed")
                call_on_loop(self._fail, error)
            finally:
                call_on_loop(ended.set)

        thread = threading.Thread(target=work, name="llamacpp", daemon=True)
        thread.start()
        try:
            await died
        finally:
            self._mailbox.close()
            await _wait_ended(thread, ended)
            await self._end_guides()

    def _fail(self, error: BaseException | None) -> None:
        assert self._died is not None, "the engine runs"
        if not self._died.done():
            self._died.set_exception(Failure(Reason.ENGINE_DEAD, f"llama.cpp failed: {error}"))

    async def _end_guides(self) -> None:
        try:
            await self._tasks.end()
        finally:
            if self._guides is not None:
                await self._guides.close()

    def _work(self, on_ready: Callable[[bytes], None], on_outputs: Callable[[Sequence[Output]], None]) -> None:
        """Run in the thread: load the model, then step while there is work, until the mailbox is closed."""
        llama = self._load_model()
        try:
            batch = self._batch = Batch(
                llama,
                sequences=self._config.sequences,
                chunk_tokens=self._config.prefill_chunk_tokens,
                is_cancelled=self._mailbox.is_cancelled,
            )
            on_ready(encode_vocabulary(llama.token_bytes(), llama.end_ids))
            while not (mail := self._mailbox.collect(wait=batch.is_empty)).is_closed:
                for key in mail.cancelled:  # First: a new request may need the place of a cancelled one.
                    batch.remove(key)
                for sequence in mail.submitted.values():
                    batch.add(sequence)
                if outputs := batch.step():
                    on_outputs(outputs)
        finally:
            llama.close()

    def _load_model(self) -> Llama:
        config = self._config
        content = tokenizer_content(config.path)
        llama = Llama(
            config.path,
            sequences=config.sequences,
            context_length=config.context_length,
            threads=config.threads,
            decode_tokens_max=max(CHUNK_TOKENS_MAX, config.sequences + 1),
        )
        self._loaded = (llama, _card_of(llama, config, content), content)
        return llama

    def _deliver(self, outputs: Sequence[Output]) -> None:
        wanted = [output for output in outputs if output.key in self._live]
        for output in wanted:
            if output.finish is not None or output.failure is not None:
                del self._live[output.key]
                self._end_guiding(output.key)
        if wanted:
            self._emit(wanted)

    def _get_loaded(self) -> tuple[Llama, ModelCard, bytes]:
        assert self._loaded is not None, "the engine is not ready"
        return self._loaded


def _card_of(llama: Llama, config: LlamaCppConfig, content: bytes) -> ModelCard:
    return ModelCard(
        model=config.served_model_name,
        engine="llamacpp",
        context_length=llama.context_length,
        vocab_size=llama.vocab_size,
        tokenizer=TokenizerRef("gguf", hashlib.sha256(content).hexdigest()),
        chat_template=llama.chat_template,
        bos_token=llama.bos_token,
        eos_token=llama.eos_token,
        guided=KINDS,
        has_logprobs=True,
        resume=Resume(sampling=True, penalties=True, guided=True, logprobs=True),
    )


async def _wait_ended(thread: threading.Thread, ended: asyncio.Event) -> None:
    """Wait at most END_TIMEOUT_S for the thread, without blocking the event loop. It sets `ended` when it returns."""
    if await wait_event(ended, END_TIMEOUT_S):
        thread.join()
    else:
        log.warning("the engine thread did not end in time, continuing without it", timeout_s=END_TIMEOUT_S)


def _check(request: Request, card: ModelCard) -> None:
    """Refuse values that would crash llama.cpp. Raises Failure."""
    prompt_count = len(request.prompt_token_ids)
    if prompt_count == 0:
        raise invalid("tokens", "the prompt is empty: send at least one token")
    used = {*request.prompt_token_ids, *request.generated_token_ids}
    if max(used) >= card.vocab_size or min(used) < 0:
        raise invalid("tokens", f"token ids must be below {card.vocab_size}, the size of the model's vocabulary")
    if any(not 0 <= token < card.vocab_size for token, _ in request.sampling.logit_bias):
        raise invalid("logit_bias", f"token ids in logit_bias must be below {card.vocab_size}")
    if any(not 0 <= token < card.vocab_size for token in request.stop.token_ids):
        raise invalid("stop.token_ids", f"stop token ids must be below {card.vocab_size}")
    total = request.token_count
    if prompt_count >= card.context_length or total > card.context_length:
        raise Failure(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {total} tokens: it must fit, with the answer, in a context of {card.context_length}",
        )
