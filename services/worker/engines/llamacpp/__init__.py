"""llama.cpp on the CPU, through cyllama's prebuilt wheel: a real model with continuous batching.

Exactness. A continuation must equal the uncut answer, and an answer must not depend on what else is in the batch. The
numbers of one token depend on the *shape* of the computation that it was part of: llama.cpp chooses kernels by shape,
and each kernel sums in its own order. The next-token scores of SmolLM2 then move by up to 0.75. These were seen to
break exactness:

- attention without flash: one token of a sequence at a time takes another code path than two or more;
- flash attention on 64 or more tokens of a sequence (tiles), and, with several threads, on a token that is alone in its
  batch once its context is past 256 tokens (keys are split over threads);
- weights in F16, which are multiplied with one row in another way than with several;
- one cache for all sequences (`kv_unified`): the position of a key in it depends on the other sequences.

`batch.py` keeps the shape that is exact, bit for bit: flash attention, a cache for each sequence, a prompt in chunks of
2 to 63 tokens that are computed by themselves, and the last token of every sequence in a step of one token for each
sequence. With several threads, or with weights of other types than those seen to be safe, a step has at least two rows
(a filler if necessary) and computes scores for each. The number of threads, the size of the chunks and the other
requests in the batch then do not matter. Weights are not repacked, because repacking also chooses kernels by shape. All
of this holds between machines that run the same build on the same file. Measured: 420 continuations from random cuts,
with random chunk sizes and random other requests, half of them greedy and half at temperature 0.8; none differed by a
token.

Log probabilities come from the same scores, so they are equally exact: 60 continuations of guided answers of every kind
had the same tokens, ends and log probabilities, to the bit. Guided decoding does not use llama.cpp's own grammar
sampler, which aborts the process on invalid input: see `services/worker/guided/__init__.py`.
"""

from services.worker.engines.llamacpp.engine import LlamaCppConfig, LlamaCppEngine

__all__ = ["LlamaCppConfig", "LlamaCppEngine"]
