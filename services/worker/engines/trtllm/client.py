"""The seam to `tensorrt_llm.LLM`: requests of ours become calls of its own, with keywords only."""

from typing import Any

from services.core.errors import Failure, Reason
from services.core.request import Request
from services.worker.engines.trtllm.installation import Installation
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments
from services.worker.engines.trtllm.sampling_params import GenerateArguments, ModelFacts, generate_arguments


class Client:
    """Loads the model when it is made, and blocks for minutes. Raises ENGINE_DEAD when it can't be loaded."""

    def __init__(self, package: Installation, config: TrtLlmConfig, facts: ModelFacts) -> None:
        self._package = package
        self._facts = facts
        self._is_ranked = config.rank_count > 1
        try:
            self.llm = package.llm(**llm_arguments(config, facts.context_length))
        except Exception as error:
            raise Failure(Reason.ENGINE_DEAD, f"TensorRT-LLM cannot load {config.model}: {error}") from error

    @property
    def request_error(self) -> type[Exception]:
        """What fails one request alone, when its result is iterated over."""
        return self._package.request_error

    def start(self, request: Request, rank: int = 0) -> Any:
        """A result to iterate over, on the loop that runs now. Raises INVALID_ARGUMENT, and whatever the engine raises.

        rank: the data-parallel rank that it goes to, and waits for, so that what is told of its load is true.
        """
        asked = generate_arguments(request, self._facts)
        scheduling = None
        if self._is_ranked:
            scheduling = self._package.scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)
        return self.llm.generate_async(
            inputs=asked.token_ids,
            sampling_params=self._sampling_params(asked),
            streaming=True,
            scheduling_params=scheduling,
        )

    def _sampling_params(self, asked: GenerateArguments) -> Any:
        """A fresh one for each request, because the engine writes into it."""
        more: dict[str, Any] = {}
        if asked.guided is not None:
            more["guided_decoding"] = self._package.guided_params(**asked.guided)
        if asked.bias:
            values = [0.0] * self._facts.vocab_size
            for token, bias in asked.bias:
                values[token] += bias
            more["embedding_bias"] = self._package.vector(values)
        return self._package.sampling_params(**asked.sampling, **more)
