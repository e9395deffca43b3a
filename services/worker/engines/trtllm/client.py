"""The adapter to `tensorrt_llm.LLM`: translates requests to its calls, with keyword arguments only."""

from typing import Any

from services.core.errors import Failure, Reason
from services.core.request import Request
from services.worker.engines.trtllm.installation import Installation
from services.worker.engines.trtllm.options import TrtLlmConfig, llm_arguments
from services.worker.engines.trtllm.sampling_params import GenerateArguments, ModelFacts, generate_arguments


class Client:
    """A loaded model. The constructor loads it and blocks for minutes; it raises ENGINE_DEAD if loading fails."""

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
        """The exception, raised by iterating over a result, that fails only that request."""
        return self._package.request_error

    def start(self, request: Request, rank: int = 0) -> Any:
        """Start a request. Returns a result to iterate over on the running event loop.

        Raises INVALID_ARGUMENT, and the exceptions of the engine.

        `rank`: the data-parallel rank of the request. It waits for this rank even if others are free, so that the
        reported load of each rank is correct.
        """
        arguments = generate_arguments(request, self._facts)
        scheduling = None
        if self._is_ranked:
            scheduling = self._package.scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)
        return self.llm.generate_async(
            inputs=arguments.token_ids,
            sampling_params=self._sampling_params(arguments),
            streaming=True,
            scheduling_params=scheduling,
        )

    def _sampling_params(self, arguments: GenerateArguments) -> Any:
        """A new object for each request, because the engine modifies it."""
        more: dict[str, Any] = {}
        if arguments.guided is not None:
            more["guided_decoding"] = self._package.guided_params(**arguments.guided)
        if arguments.bias:
            values = [0.0] * self._facts.vocab_size
            for token, bias in arguments.bias:
                values[token] += bias
            more["embedding_bias"] = self._package.vector(values)
        return self._package.sampling_params(**arguments.sampling, **more)
