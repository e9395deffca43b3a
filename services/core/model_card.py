"""The model card: what a worker serves, how its tokens are decoded, and what its engine can resume after a move."""

from dataclasses import dataclass, field

from services.core.request import Request


@dataclass(frozen=True, slots=True)
class TokenizerRef:
    """Identifies a tokeniser. `kind`: "bytes", "gguf" or "huggingface". `sha256`: of its file; "" for "bytes"."""

    kind: str
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """For each kind of state, whether the engine continues exactly after `generated_token_ids`.

    `sampling`: an engine without it does not use seeds, so its requests are given none. It still draws from the same
    distribution after the same tokens.
    """

    sampling: bool = True
    penalties: bool = True
    guided: bool = False
    logprobs: bool = False

    def lacking_for(self, request: Request) -> str | None:
        """The first field of the request whose state the engine loses after `generated_token_ids`; None: it loses none.

        `sampling` is left out.
        """
        if request.sampling.has_penalties and not self.penalties:
            return "penalties"
        if request.guided is not None and not self.guided:
            return "guided"
        return "logprobs" if request.logprobs is not None and not self.logprobs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """See `ModelCard` in worker.proto; `context_length` counts prompt and answer together."""

    model: str
    engine: str
    context_length: int
    vocab_size: int
    tokenizer: TokenizerRef
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    default_temperature: float = 1.0
    guided: tuple[str, ...] = ()
    has_logprobs: bool = False
    resume: Resume = field(default_factory=Resume)
