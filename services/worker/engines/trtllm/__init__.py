"""TensorRT-LLM on GPUs, through its LLM API of version 1.2.

It is imported when the engine starts, and not before: this package can be imported anywhere. Its sampler draws from no
seed and knows no penalties, and what state it has it does not give away. So greedy answers go on elsewhere after the
last token, and sampled and guided ones do not: their requests fail honestly, as the card says. The numbers of one token
depend on what else is in the batch, as with any engine on a GPU that is not told otherwise: where two tokens are almost
equally likely, a continuation may take the other one than the uncut answer had taken.

The known problems of this version, and what the worker does about each, are a table in docs/gpus.md.
"""

from services.worker.engines.trtllm.engine import TrtLlmEngine
from services.worker.engines.trtllm.options import TrtLlmConfig

__all__ = ["TrtLlmConfig", "TrtLlmEngine"]
