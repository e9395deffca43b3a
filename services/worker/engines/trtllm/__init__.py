"""TensorRT-LLM on GPUs, through its LLM API of version 1.2.

TensorRT-LLM is imported when the engine starts, so this package can be imported without it. Its sampler supports no
seed and no penalties, and it does not export its state. Greedy answers therefore continue on another worker after the
last token. Sampled ones continue with other draws, unless the operator or the client wants the very tokens; guided ones
fail, as the model card says. The scores of a token
depend on the rest of the batch, as with most engines on a GPU: where two tokens are almost equally likely, a
continuation may draw the other one than the uncut answer would have.

The table in docs/gpus.md lists the known problems of this version, and how the worker deals with each.
"""

from services.worker.engines.trtllm.engine import TrtLlmEngine
from services.worker.engines.trtllm.options import TrtLlmConfig

__all__ = ["TrtLlmConfig", "TrtLlmEngine"]
