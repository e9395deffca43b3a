"""The mocker: a fast engine whose tokens prove themselves, for tests, benches and trying things out.

Token k is a hash of all token ids before it (prompt and generated), of the sampling parameters and, unless the
temperature is 0, of the seed. So any token that is lost, doubled or out of order changes everything after it, and a
continuation that equals the undisturbed answer was continued exactly. Text is letters, some accents, CJK and emoji, one
byte a token: characters are split over tokens all the time.
"""

import asyncio
import hashlib
import math
import os
import signal
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.card import ModelCard, Resume, TokenizerRef
from services.errors import Failure, Reason
from services.request import FinishReason, Request, TokenLogprobs
from services.tokenizers.byte_level import EOS, VOCAB_SIZE
from services.worker.engine import Emit, EngineLoad, Output, RankLoad

_CHARACTERS = [*"etaoinshrdlcumwfgypb", *" " * 6, ",", ".", "\n", *"éßдא", *"漢字語", *"🎉🚀"]
_EOS_ODDS = 400
"""At the start of a character the answer ends with a chance of one in this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong on command, once some request has got so many tokens from this process (None: never).

    0 is before its first token. die_after: the process kills itself. freeze_after: it stops itself (SIGSTOP).
    leave_after: it asks itself to leave (SIGTERM). hang_after: the engine stops for good, under a live server.
    raise_after: the request fails. Others: die_on_token: a prompt with this token kills the process at its first step.
    refuse: this many submissions are refused first. hold: no step is made before there are so many requests, so that
    all of them stand at the same position when something happens. linger_ms: how long it waits before it dies or
    stops, so that all it has drawn has been sent. mute_after: it reports no load any more. mute_rank: this rank never
    reports.
    """

    die_after: int | None = None
    freeze_after: int | None = None
    leave_after: int | None = None
    hang_after: int | None = None
    raise_after: int | None = None
    die_on_token: int | None = None
    refuse: int = 0
    hold: int = 1
    linger_ms: int = 0
    mute_after: int | None = None
    mute_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MockerConfig:
    """itl_ms: time between tokens. prefill_us_per_token: on top of it, for each prompt token. startup_s: loading."""

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


def _next_bytes() -> dict[bytes, bytes]:
    """For each beginning of a character the bytes that may follow, as often as they are to be likely."""
    follow: dict[bytes, bytes] = {}
    for character in _CHARACTERS:
        encoded = character.encode()
        for cut in range(len(encoded)):
            follow[encoded[:cut]] = follow.get(encoded[:cut], b"") + encoded[cut : cut + 1]
    return follow


_FOLLOW = _next_bytes()


def _advance(begun: bytes, token: int) -> bytes:
    """What has begun of a character after one more token; nothing if that ends it, or is none of ours."""
    begun = begun + bytes((token,)) if token < EOS else b""
    return begun if begun in _FOLLOW else b""


class _Sequence:
    """One request: the hash over all its tokens so far, and what has begun of a character."""

    def __init__(self, key: int, request: Request) -> None:
        self.key = key
        self.request = request
        self.generated_count = len(request.generated_token_ids)
        self.emitted_count = 0
        self.prefill_left = len(request.prompt_token_ids) + self.generated_count
        self._hash = hashlib.blake2b(_draw(request), digest_size=8)
        self._hash.update(array("I", request.prompt_token_ids + request.generated_token_ids).tobytes())
        self._begun = b""
        for token in request.generated_token_ids:
            self._begun = _advance(self._begun, token)

    @property
    def token_count(self) -> int:
        return len(self.request.prompt_token_ids) + self.generated_count

    def step(self, context_length: int) -> Output:
        """One token, or the end."""
        if self._is_at_limit(context_length):
            return Output(self.key, finish=FinishReason.LENGTH)
        token = self._draw_token()
        if token is None:
            return Output(self.key, finish=FinishReason.STOP)
        logprobs = None if self.request.logprobs is None else (self._logprobs(token, self.request.logprobs),)
        self._hash.update(struct.pack("I", token))
        self._begun = _advance(self._begun, token)
        self.generated_count += 1
        self.emitted_count += 1
        finish = FinishReason.LENGTH if self._is_at_limit(context_length) else None
        return Output(self.key, (token,), finish, logprobs=logprobs)

    def _is_at_limit(self, context_length: int) -> bool:
        return self.generated_count >= self.request.max_tokens or self.token_count >= context_length

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        """Made up of all tokens so far, like the token itself: each rival is half as likely as the one before it."""
        rivals = list(dict.fromkeys((token, *_candidates(_FOLLOW[self._begun], self._value()))))
        shift = self._value() % 1000 * 1e-3
        values = [(rival, -math.log(2) * (rank + 1) - shift) for rank, rival in enumerate(rivals)]
        return TokenLogprobs(values[0][1], tuple(values[:top]))

    def _value(self) -> int:
        """The hash of all so far."""
        return int.from_bytes(self._hash.copy().digest(), "little")

    def _draw_token(self) -> int | None:
        stop = self.request.stop
        value = self._value()
        may_stop = self.generated_count >= stop.min_tokens
        if may_stop and not stop.ignore_eos and not self._begun and value % _EOS_ODDS == 0:
            return None
        for token in _candidates(_FOLLOW[self._begun], value // _EOS_ODDS):
            if token not in stop.token_ids:
                return token
            if may_stop:
                return None
        return None  # Every token is a stop token, so not even min_tokens can be reached.


def _candidates(follow: bytes, value: int) -> Iterator[int]:
    start = value % len(follow)
    yield from follow[start:]
    yield from follow[:start]


def _draw(request: Request) -> bytes:
    """All that the draw depends on besides the tokens. At temperature 0 the seed and the choice do not matter."""
    sampling = request.sampling
    seeded = () if sampling.is_greedy else (sampling.seed, request.choice)
    shape = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.logit_bias)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return repr((seeded, shape, penalties)).encode()


class MockerEngine:
    """See the module. Prompts are computed in chunks, first come first served, while the others go on."""

    def __init__(self, config: MockerConfig) -> None:
        self._config = config
        self._sequences: dict[int, _Sequence] = {}
        self._has_work = asyncio.Event()
        self._steps = 0
        self._refusals_left = config.faults.refuse
        self._quorum = config.faults.hold
        self._has_left = False
        self.request_limit = config.request_limit
        self.card = ModelCard(
            model=config.served_model_name,
            engine="mocker",
            context_length=config.context_length,
            vocab_size=VOCAB_SIZE,
            tokenizer=TokenizerRef("bytes"),
            default_temperature=0.0,
            has_logprobs=True,
            resume=Resume(logprobs=True),
            chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
        )

    def tokenizer_content(self) -> bytes:
        return b""

    def submit(self, key: int, request: Request) -> None:
        if self._refusals_left > 0:
            self._refusals_left -= 1
            raise Failure(Reason.WORKER_AT_CAPACITY, "Server overloaded: worker at capacity (on command)")
        assert len(request.prompt_token_ids) < self._config.context_length, "see services/worker/check.py"
        self._sequences[key] = _Sequence(key, request)
        self._has_work.set()

    def cancel(self, key: int) -> None:
        self._sequences.pop(key, None)

    def load(self) -> EngineLoad:
        block = self._config.kv_block_tokens
        used = sum(-(-sequence.token_count // block) for sequence in self._sequences.values())
        prefill = sum(sequence.prefill_left for sequence in self._sequences.values())
        return EngineLoad(self._steps, (RankLoad(used, self._config.kv_blocks_total, prefill),))

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        await asyncio.sleep(self._config.startup_s)
        ready.set()
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            while len(self._sequences) < self._quorum:
                self._has_work.clear()
                await self._has_work.wait()
                due = loop.time()
            self._quorum = 1
            prefilled = self._prefill()
            due = max(due, loop.time() - self._config.itl_ms * 1e-3)  # Late by more than a step: don't catch up.
            due += self._config.itl_ms * 1e-3 + prefilled * self._config.prefill_us_per_token * 1e-6
            await asyncio.sleep(due - loop.time())
            running = [one for one in self._sequences.values() if one.prefill_left == 0]
            await self._break_on_command(running)
            self._step(running, emit)
            await self._break_on_command(running)

    def _prefill(self) -> int:
        """Work off at most one chunk of the prompts that wait. Returns how many tokens that was."""
        left = self._config.prefill_chunk_tokens
        for sequence in self._sequences.values():
            taken = min(left, sequence.prefill_left)
            sequence.prefill_left -= taken
            left -= taken
            if left == 0:
                break
        return self._config.prefill_chunk_tokens - left

    def _step(self, running: Sequence[_Sequence], emit: Emit) -> None:
        self._steps += 1
        outputs = [self._output(sequence) for sequence in running]
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                del self._sequences[output.key]
        if outputs:
            emit(outputs)

    def _output(self, sequence: _Sequence) -> Output:
        raise_after = self._config.faults.raise_after
        if raise_after is not None and sequence.emitted_count >= raise_after:
            failure = Failure(Reason.ENGINE_ERROR, f"the mocker failed after {raise_after} tokens, on command")
            return Output(sequence.key, failure=failure)
        return sequence.step(self._config.context_length)

    async def _break_on_command(self, running: Sequence[_Sequence]) -> None:
        faults = self._config.faults
        if _has_one_at(faults.die_after, running) or _has_one_with(faults.die_on_token, running):
            await asyncio.sleep(faults.linger_ms * 1e-3)
            os.kill(os.getpid(), signal.SIGKILL)
        if _has_one_at(faults.freeze_after, running):
            await asyncio.sleep(faults.linger_ms * 1e-3)
            os.kill(os.getpid(), signal.SIGSTOP)
        if _has_one_at(faults.leave_after, running) and not self._has_left:
            self._has_left = True
            os.kill(os.getpid(), signal.SIGTERM)
        if _has_one_at(faults.hang_after, running):
            await asyncio.Event().wait()


def _has_one_at(count: int | None, running: Sequence[_Sequence]) -> bool:
    return count is not None and any(sequence.emitted_count >= count for sequence in running)


def _has_one_with(token: int | None, running: Sequence[_Sequence]) -> bool:
    return token is not None and any(token in sequence.request.prompt_token_ids for sequence in running)
