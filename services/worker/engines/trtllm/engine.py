"""The engine as the worker sees it: the model's folder is read at once, TensorRT-LLM is loaded when the engine runs."""

import asyncio
import math

import structlog

from services.core.model_card import ModelCard, Resume
from services.core.request import Request
from services.models.hf_checkpoint import ModelFolder, read_model_folder
from services.runtime.process import StartupError
from services.worker.engine import Emit, EngineLoad
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.installation import check_package, load_package
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.runner import Runner
from services.worker.engines.trtllm.sampling_params import ModelFacts, guided_kinds
from services.worker.engines.trtllm.shutdown import exiting_on_signals

log = structlog.get_logger()

SEQ_LEN_DEFAULT_MAX = 8192
"""Tokens of prompt and answer where nobody says: a model may be made for a million, and no cache would hold that."""


class TrtLlmEngine:
    """See the package. Raises StartupError when the model's folder or TensorRT-LLM is not what it has to be.

    All that touches the engine runs on one loop in one thread, for its client wakes all readers by way of one loop.
    Loading, too: it holds the loop up for minutes while nobody waits for it, since a worker is announced and takes
    sessions only once `ready` is set.
    """

    def __init__(self, config: TrtLlmConfig) -> None:
        check_package()
        self._config = config
        self._folder = _read_folder(config)
        self._facts = _facts_of(self._folder, config)
        self._serving: Runner | None = None
        self.request_limit = config.max_batch_size
        self.card = _card_of(self._folder, self._facts, config)

    def tokenizer_content(self) -> bytes:
        return self._folder.tokenizer_content

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        """Raises StartupError, too, and returns no later than `shutdown_s` after it is cancelled."""
        log.info("loading the model", model=str(self._config.model), context_length=self._facts.context_length)
        with exiting_on_signals():
            client = Client(load_package(), self._config, self._facts)
        self._serving = Runner(client, self._config, self._facts, emit)
        await self._serving.run(ready)

    def submit(self, key: int, request: Request) -> None:
        assert self._serving is not None, "the engine is not ready"
        self._serving.submit(key, request)

    def cancel(self, key: int) -> None:
        if self._serving is not None:
            self._serving.cancel(key)

    def load(self) -> EngineLoad:
        """No rank before it has loaded."""
        return EngineLoad(0, ()) if self._serving is None else self._serving.load()


def _read_folder(config: TrtLlmConfig) -> ModelFolder:
    try:
        return read_model_folder(config.model)
    except ValueError as error:
        raise StartupError(f"--engine trtllm --model {config.model}: {error}") from error


def _facts_of(folder: ModelFolder, config: TrtLlmConfig) -> ModelFacts:
    """Raises StartupError."""
    if not folder.end_ids:
        raise StartupError(f"--model {folder.path} names no end token, so no answer would end: set eos_token_id in it")
    if config.max_seq_len is not None and config.max_seq_len > (folder.context_length or math.inf):
        raise StartupError(
            f"--max-seq-len {config.max_seq_len} is more than the {folder.context_length} the model was made for"
        )
    return ModelFacts(
        context_length=config.max_seq_len or min(folder.context_length or SEQ_LEN_DEFAULT_MAX, SEQ_LEN_DEFAULT_MAX),
        vocab_size=folder.vocab_size,
        end_ids=folder.end_ids,
        guided_backend=config.guided_decoding_backend,
    )


def _card_of(folder: ModelFolder, facts: ModelFacts, config: TrtLlmConfig) -> ModelCard:
    """It carries over nothing that needs the state of a draw, a count or a form, for the engine exports none.

    Log probabilities need none: they follow from the tokens before, as far as anything does on a GPU.
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
