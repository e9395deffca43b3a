"""llama.cpp on the CPU, through cyllama's prebuilt wheel: a real model with continuous batching.

Exactness. A continuation must equal the uncut answer, and an answer must not depend on what else is in the batch. The
numbers of one token depend on the *shape* of the computation that it was part of, because llama.cpp chooses kernels by
shape, and each sums in an order of its own. The next-token scores of SmolLM2 then move by up to 0.75. Seen to break it:

- attention without flash: one token of a sequence at a time goes another way than two or more;
- flash attention on 64 tokens of a sequence and more (tiles), and, with several threads, on one token alone in its
  batch once its context is past 256 (keys split over threads);
- weights in F16, which are multiplied with one row in another way than with several;
- one cache for all sequences (`kv_unified`): where a key lies in it depends on the others.

The shape that holds, bit for bit, is kept by `batch.py`: flash attention, a cache for each sequence, a prompt in pieces
of 2 to 63 tokens by themselves, and the last token of every sequence in a step of one token for each sequence. With
several threads, or weights of other types than those seen to be safe, a step has at least two rows, a filler if need
be, and scores for each. Number of threads, size of the pieces and company then do not matter. Weights are not
repacked, since that chooses kernels by shape, too. All of this holds between machines that run the same build on the
same file. Seen: 420 continuations from random cuts, in random pieces and company, half of them greedy and half at
temperature 0.8, none different by a token.

Log probabilities come from the same scores, so they are as exact: 60 continuations of answers held to forms of every
kind had the same tokens, ends and log probabilities, to the bit. Forms are kept beside llama.cpp, whose own grammar
sampler aborts the process on what does not fit: see `services/worker/engines/llamacpp/grammar.py`.
"""

from services.worker.engines.llamacpp.engine import LlamaCppConfig, LlamaCppEngine

__all__ = ["LlamaCppConfig", "LlamaCppEngine"]
