"""The engine as the event loop sees it: one thread that steps, a mailbox to it, and outputs back, a batch per step."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import Request
from services.runtime.process import StartupError
from services.worker.engine import Emit, EngineLoad, Output, RankLoad

try:
    from services.models.tokenizers.gguf import tokenizer_content
    from services.worker.engines.llamacpp.batch import PIECE_TOKENS_MAX, PIECE_TOKENS_MIN, Batch, Running, blocks_of
    from services.worker.engines.llamacpp.grammar import KINDS, Form
    from services.worker.engines.llamacpp.grammar_compiler import GrammarCompiler, Making
    from services.worker.engines.llamacpp.model import Llama
except (ImportError, Failure) as error:
    raise StartupError("the llamacpp engine needs llama.cpp: pip install 'unbroken[llamacpp]'") from error

log = structlog.get_logger()

END_TIMEOUT_S = 10.0
"""How long ending waits for the step, or the loading, that is under way."""
_IDLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppConfig:
    """context_length: tokens of prompt and answer of one sequence, at most the model's own; by default 2048 of them.

    sequences: how many run at a time. threads: a second one is a gain on a core of its own only, and costs a filler in
    each step of a lone sequence. prefill_chunk_tokens: how much of a prompt is computed between two tokens of others.
    """

    path: Path
    served_model_name: str
    sequences: int = 4
    context_length: int | None = None
    threads: int = 1
    prefill_chunk_tokens: int = 16

    def __post_init__(self) -> None:
        assert self.sequences >= 1
        assert PIECE_TOKENS_MIN <= self.prefill_chunk_tokens <= PIECE_TOKENS_MAX


@dataclass(slots=True)
class _Mail:
    """What the loop asks of the thread."""

    submitted: dict[int, Running]
    cancelled: set[int]
    is_closed: bool = False


class _Mailbox:
    """Takes orders without waiting; its lock is held for no longer than it takes to note one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mail = _Mail({}, set())

    def submit(self, running: Running) -> None:
        with self._changed:
            self._mail.submitted[running.key] = running
            self._changed.notify()

    def cancel(self, key: int) -> None:
        with self._changed:
            if self._mail.submitted.pop(key, None) is None:
                self._mail.cancelled.add(key)
            self._changed.notify()

    def is_cancelled(self, key: int) -> bool:
        """Whether it was cancelled since the last time that the mail was taken."""
        with self._changed:
            return key in self._mail.cancelled

    def close(self) -> None:
        with self._changed:
            self._mail.is_closed = True
            self._changed.notify()

    def take(self, *, wait: bool) -> _Mail:
        """All orders since the last time. wait: for one, but at most a second."""
        with self._changed:
            if wait and not (self._mail.submitted or self._mail.cancelled or self._mail.is_closed):
                self._changed.wait(_IDLE_WAIT_S)
            mail, self._mail = self._mail, _Mail({}, set(), self._mail.is_closed)
        return mail


class LlamaCppEngine:
    """See the package for what makes its answers exact."""

    def __init__(self, config: LlamaCppConfig) -> None:
        self._config = config
        self._mailbox = _Mailbox()
        self._live: dict[int, Running] = {}  # What may be emitted, by key. Only the event loop changes it.
        self._making: dict[int, Making] = {}  # Forms on their way, of some of those.
        self._loaded: tuple[Llama, ModelCard, bytes] | None = None
        self._batch: Batch | None = None
        self._form_maker: GrammarCompiler | None = None
        self._emit: Emit = lambda _: None
        self.request_limit = config.sequences

    @property
    def card(self) -> ModelCard:
        return self._get_loaded()[1]

    def tokenizer_content(self) -> bytes:
        return self._get_loaded()[2]

    def load(self) -> EngineLoad:
        """Of all that were submitted and have neither ended nor been cancelled, wherever they stand.

        kv_blocks_total: what N sequences of a whole context take. llama.cpp allocates that and some padding, which no
        request can fill: each sequence's cache is rounded up to 256 tokens.
        """
        if self._batch is None:
            return EngineLoad(0, (RankLoad(0, 0, 0),))
        used = sum(running.block_count for running in self._live.values())
        total = self.request_limit * blocks_of(self.card.context_length)
        prefill = sum(running.prefill_left for running in self._live.values())
        return replace(self._batch.counts, ranks=(RankLoad(used, total, prefill),))

    def submit(self, key: int, request: Request) -> None:
        _check(request, self.card)
        if len(self._live) >= self.request_limit:
            detail = "Server overloaded: worker at capacity"
            raise Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.CAPACITY})
        running = Running(key, request, self._get_loaded()[0].end_ids)
        if request.guided is None:
            self._mailbox.submit(running)
        else:
            assert self._form_maker is not None, "the engine is not ready"
            self._making[key] = self._form_maker.start(request, lambda result: self._take_form(running, result))
        self._live[key] = running

    def _take_form(self, running: Running, result: Form | Failure) -> None:
        del self._making[running.key]
        if isinstance(result, Failure):
            self._deliver([Output(running.key, failure=result)])
        else:
            running.form = result
            self._mailbox.submit(running)

    def cancel(self, key: int) -> None:
        if self._live.pop(key, None) is None:
            return
        making = self._making.pop(key, None)
        if making is None:
            self._mailbox.cancel(key)
        else:
            assert self._form_maker is not None, "it makes this form"
            self._form_maker.cancel(making)

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """Raises Failure(ENGINE_DEAD) when loading or a step fails.

        cyllama holds Python's global lock while it reads a file, so loading stops the event loop, too, for up to 0.7 s
        with 100 MB. Nobody waits for it then: a worker is announced, and takes sessions, only once `ready` is set.
        """
        self._emit = emit
        loop = asyncio.get_running_loop()
        died: asyncio.Future[None] = loop.create_future()
        ended = asyncio.Event()

        def tell(callback: Callable[..., object], *args: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *args)

        def start() -> None:
            self._form_maker = GrammarCompiler(loop, self._get_loaded()[0].forms)
            ready.set()

        def fail(error: BaseException) -> None:
            if not died.done():
                died.set_exception(Failure(Reason.ENGINE_DEAD, f"llama.cpp failed: {error}"))

        def work() -> None:
            try:
                self._work(lambda: tell(start), lambda outputs: tell(self._deliver, outputs))
            except BaseException as error:  # A panic in Rust is no Exception.
                log.exception("the engine's thread died")
                tell(fail, error)
            finally:
                tell(ended.set)

        thread = threading.Thread(target=work, name="llamacpp", daemon=True)
        thread.start()
        try:
            await died
        finally:
            self._mailbox.close()
            await _wait_ended(thread, ended)

    def _work(self, on_ready: Callable[[], None], on_outputs: Callable[[Sequence[Output]], None]) -> None:
        """The thread: load, then step while there is work, until the mailbox is closed."""
        llama = self._load_model()
        try:
            batch = self._batch = Batch(
                llama,
                streams=self._config.sequences,
                piece_tokens=self._config.prefill_chunk_tokens,
                is_cancelled=self._mailbox.is_cancelled,
            )
            on_ready()
            while not (mail := self._mailbox.take(wait=batch.is_empty)).is_closed:
                for key in mail.cancelled:  # First, to make place for what was submitted instead.
                    batch.remove(key)
                for running in mail.submitted.values():
                    batch.add(running)
                if outputs := batch.step():
                    on_outputs(outputs)
        finally:
            llama.close()

    def _load_model(self) -> Llama:
        config = self._config
        content = tokenizer_content(config.path)
        llama = Llama(
            config.path,
            streams=config.sequences,
            context_length=config.context_length,
            threads=config.threads,
            decode_tokens_max=max(PIECE_TOKENS_MAX, config.sequences + 1),
        )
        self._loaded = (llama, _card_of(llama, config, content), content)
        return llama

    def _deliver(self, outputs: Sequence[Output]) -> None:
        wanted = [output for output in outputs if output.key in self._live]
        for output in wanted:
            if output.finish is not None or output.failure is not None:
                del self._live[output.key]
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
    """Wait for the thread, but not for ever, while the event loop goes on. ended: its last act is to set this."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await ended.wait()
    except TimeoutError:
        log.warning("the engine's thread is still in a step; leaving it behind")
    else:
        thread.join()


def _check(request: Request, card: ModelCard) -> None:
    """Refuse what llama.cpp would crash on. Raises Failure."""
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
            f"the prompt has {total} tokens where the model's context has {card.context_length}, with the answer",
        )
