"""The engine as the worker sees it: it reads the model's folder at once, and loads TensorRT-LLM when it runs."""

import asyncio
import math
from collections import Counter
from dataclasses import replace

import structlog

from services.core.model_card import ModelCard, Resume
from services.core.request import Request
from services.isolation.losses import Loss
from services.models.hf_checkpoint import ModelFolder, read_model_folder
from services.runtime.process import StartupError
from services.worker.engine import Emit, EngineLoad
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.installation import check_package, load_package
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.runner import Runner
from services.worker.engines.trtllm.sampling_params import ModelFacts, guided_kinds
from services.worker.engines.trtllm.shutdown import exiting_on_signals
from services.worker.guided.trials import Trials

log = structlog.get_logger()

SEQ_LEN_DEFAULT_MAX = 8192
"""Tokens of prompt and answer by default: a model may support a million, and no cache would hold that many."""


class TrtLlmEngine:
    """Serves a model with TensorRT-LLM. Raises StartupError if the model's folder or TensorRT-LLM is unusable.

    All calls into TensorRT-LLM run on one event loop in one thread, because its client wakes all readers through one
    loop. This includes loading, which blocks the loop for minutes; no request waits then, because a worker registers
    and accepts sessions only once `ready` is set.
    """

    def __init__(self, config: TrtLlmConfig) -> None:
        check_package()
        self._config = config
        self._folder = _read_folder(config)
        self._facts = _facts_of(self._folder, config)
        self._runner: Runner | None = None
        self._helpers_lost: Counter[Loss] = Counter()
        self.request_limit = config.max_batch_size
        self.card = _card_of(self._folder, self._facts, config)

    def tokenizer_content(self) -> bytes:
        return self._folder.tokenizer_content

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """See Engine. Also raises StartupError. Returns at most `shutdown_s` after it is cancelled."""
        log.info("loading the model", model=str(self._config.model), context_length=self._facts.context_length)
        with exiting_on_signals():
            client = Client(load_package(), self._config, self._facts)
        trials = self._trials()
        self._runner = Runner(client, self._config, self._facts, emit, trials)
        try:
            await self._runner.run(ready)
        finally:
            if trials is not None:
                await trials.close()

    def _trials(self) -> Trials | None:
        facts = self._facts
        if facts.guided_backend is None:
            return None
        content = self._folder.tokenizer_content
        return Trials(facts.guided_backend, content, facts.vocab_size, facts.end_ids, self._count_lost)

    def _count_lost(self, loss: Loss) -> None:
        self._helpers_lost[loss] += 1

    def submit(self, key: int, request: Request) -> None:
        assert self._runner is not None, "the engine is not ready"
        self._runner.submit(key, request)

    def cancel(self, key: int) -> None:
        if self._runner is not None:
            self._runner.cancel(key)

    def load(self) -> EngineLoad:
        """See Engine. There are no ranks before the model is loaded."""
        load = EngineLoad(0, ()) if self._runner is None else self._runner.load()
        return replace(load, helpers_lost=self._helpers_lost)


def _read_folder(config: TrtLlmConfig) -> ModelFolder:
    try:
        return read_model_folder(config.model)
    except ValueError as error:
        raise StartupError(f"--engine trtllm --model {config.model}: {error}") from error


def _facts_of(folder: ModelFolder, config: TrtLlmConfig) -> ModelFacts:
    """Raises StartupError."""
    if not folder.end_ids:
        raise StartupError(
            f"--model {folder.path} has no end token, so answers would not end: set eos_token_id in its config.json"
        )
    if config.max_seq_len is not None and config.max_seq_len > (folder.context_length or math.inf):
        raise StartupError(
            f"--max-seq-len {config.max_seq_len} is more than the {folder.context_length} that the model supports"
        )
    return ModelFacts(
        context_length=config.max_seq_len or min(folder.context_length or SEQ_LEN_DEFAULT_MAX, SEQ_LEN_DEFAULT_MAX),
        vocab_size=folder.vocab_size,
        end_ids=folder.end_ids,
        guided_backend=config.guided_decoding_backend,
    )


def _card_of(folder: ModelFolder, facts: ModelFacts, config: TrtLlmConfig) -> ModelCard:
    """The model card.

    It promises no exact continuation of sampled, penalised or guided answers: the engine does not export the state that
    they need. Log probabilities need no state: they depend on the tokens before, as far as a GPU is deterministic.
    """
    return ModelCard(
        model=config.served_model_name,
        engine="trtllm",
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        tokenizer=folder.tokenizer,
        chat_template=folder.chat_template,
        bos_token=folder.bos_token,
        eos_token=folder.eos_token,
        guided=guided_kinds(facts.guided_backend),
        has_logprobs=True,
        resume=Resume(sampling=False, penalties=False, guided=False, logprobs=True),
    )
