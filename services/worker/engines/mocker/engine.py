"""The mocker's step loop: data-parallel ranks, chunked prefill, and one token for each sequence in a step."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from services.core.errors import invalid
from services.core.model_card import ModelCard, Resume, TokenizerRef
from services.core.request import Request
from services.models.tokenizers.byte_level import VOCAB_SIZE
from services.worker.engine import Emit, EngineLoad, Output
from services.worker.engines.mocker.faults import FaultInjector, Faults
from services.worker.engines.mocker.rank import Chunk, Rank, next_chunks
from services.worker.engines.mocker.sequence import MockerSequence, can_reach_min_tokens

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}\n{% endfor %}"
    "assistant: "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerConfig:
    """Settings of the mocker.

    `itl_ms`: time between tokens. `prefill_us_per_token`: additional time of a step for each prompt token that it
    computes. `startup_s`: how long loading takes.

    `dp_ranks`: each rank has `kv_blocks_total` blocks of `kv_block_tokens` and computes up to `prefill_chunk_tokens` of
    its prompts in a step. Ranks step together, like ranks that share experts: a step takes as long as the rank with the
    most to compute. `request_limit`: for all ranks together. The blocks of one rank bound the context.
    """

    served_model_name: str = "mocker"
    itl_ms: float = 6.0
    prefill_us_per_token: float = 0.0
    prefill_chunk_tokens: int = 2048
    startup_s: float = 0.0
    request_limit: int = 1024
    context_length: int = 131_072
    kv_block_tokens: int = 16
    kv_blocks_total: int = 65_536
    dp_ranks: int = 1
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        assert self.dp_ranks >= 1
        assert self.faults.mute_rank is None or self.faults.mute_rank < self.dp_ranks


class MockerEngine:
    """The mocker; the package docstring describes its tokens.

    Prompts are computed in chunks, first come, first served, while other sequences continue. A request goes to the rank
    with the fewest tokens; its answer does not depend on the rank.
    """

    def __init__(self, config: MockerConfig) -> None:
        self._config = config
        self._ranks = [
            Rank(number, blocks_total=config.kv_blocks_total, block_tokens=config.kv_block_tokens)
            for number in range(config.dp_ranks)
        ]
        self._rank_of: dict[int, Rank] = {}  # By key.
        self._has_work = asyncio.Event()
        self._fault_injector = FaultInjector(config.faults)
        self._requests_min = config.faults.hold  # 1 after the first step.
        self._steps = self._prefill_tokens = self._generated_tokens = self._tokens_after_cancel = 0
        self.request_limit = config.request_limit
        self.card = ModelCard(
            model=config.served_model_name,
            engine="mocker",
            context_length=min(config.context_length, config.kv_blocks_total * config.kv_block_tokens),
            vocab_size=VOCAB_SIZE,
            tokenizer=TokenizerRef("bytes"),
            default_temperature=0.0,
            has_logprobs=True,
            resume=Resume(logprobs=True),
            chat_template=_CHAT_TEMPLATE,
        )

    def tokenizer_content(self) -> bytes:
        return b""

    def submit(self, key: int, request: Request) -> None:
        self._fault_injector.check_submission()
        assert len(request.prompt_token_ids) < self.card.context_length, "see services/worker/validate.py"
        if not can_reach_min_tokens(request):
            raise invalid(
                "min_tokens", "stop_token_ids has every token, so min_tokens cannot be reached: leave one out"
            )
        rank = self._ranks[0] if len(self._ranks) == 1 else min(self._ranks, key=attrgetter("token_count"))
        rank.add(MockerSequence(key, request))
        self._rank_of[key] = rank
        self._has_work.set()

    def cancel(self, key: int) -> None:
        sequence = self._remove(key)
        if sequence is not None:
            sequence.is_cancelled = True

    def _remove(self, key: int) -> MockerSequence | None:
        rank = self._rank_of.pop(key, None)
        return None if rank is None else rank.remove(key)

    def load(self) -> EngineLoad:
        ranks = (rank.load() for number, rank in enumerate(self._ranks) if not self._fault_injector.is_muted(number))
        return EngineLoad(
            self._steps, tuple(ranks), self._prefill_tokens, self._generated_tokens, self._tokens_after_cancel
        )

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        await asyncio.sleep(self._config.startup_s)
        ready.set()
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if await self._wait_work():
                due = loop.time()
            fitting = [rank.fit() for rank in self._ranks]
            chunks = [next_chunks(residents, self._config.prefill_chunk_tokens) for residents in fitting]
            due = max(due, loop.time() - self._config.itl_ms * 1e-3)  # Do not make up for a delay of more than a step.
            due += self._step_s(chunks)
            await asyncio.sleep(due - loop.time())
            self._finish_prefill(chunk for of_rank in chunks for chunk in of_rank)
            await self._fault_injector.act(_ready(fitting))
            running = _ready(fitting)  # Again: a request may have been cancelled meanwhile.
            self._step(running, emit)
            await self._fault_injector.act(running)

    async def _wait_work(self) -> bool:
        """Wait until there are enough requests for a step. Returns whether it had to wait."""
        has_waited = False
        while len(self._rank_of) < self._requests_min:
            has_waited = True
            self._has_work.clear()
            await self._has_work.wait()
        self._requests_min = 1
        return has_waited

    def _step_s(self, chunks: Sequence[Sequence[Chunk]]) -> float:
        """The duration of a step that computes these chunks, given for each rank."""
        prefilled = max(sum(size for _, size in of_rank) for of_rank in chunks)
        return self._config.itl_ms * 1e-3 + prefilled * self._config.prefill_us_per_token * 1e-6

    def _finish_prefill(self, chunks: Iterable[Chunk]) -> None:
        """Record the computed chunks, including those of cancelled requests: a step cannot be interrupted."""
        for sequence, size in chunks:
            sequence.prefill_left -= size
            self._prefill_tokens += size
            if sequence.is_cancelled:
                self._tokens_after_cancel += size

    def _step(self, running: Sequence[MockerSequence], emit: Emit) -> None:
        self._steps += 1
        outputs = [self._output(sequence) for sequence in running]
        for output in outputs:
            self._generated_tokens += len(output.token_ids)
            if output.finish is not None or output.failure is not None:
                self._remove(output.key)
        if outputs:
            emit(outputs)

    def _output(self, sequence: MockerSequence) -> Output:
        failure = self._fault_injector.failure_of(sequence)
        if failure is not None:
            return Output(sequence.key, failure=failure)
        return sequence.step(self.card.context_length)


def _ready(fitting: Sequence[Sequence[MockerSequence]]) -> list[MockerSequence]:
    """The sequences that draw a token in this step: their prompt is computed, and they are not cancelled."""
    return [one for residents in fitting for one in residents if one.prefill_left == 0 and not one.is_cancelled]
