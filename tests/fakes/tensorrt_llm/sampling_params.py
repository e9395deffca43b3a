"""The sampling parameters of one request. The engine modifies the object, so each request needs its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class _Vector(Protocol):
    """A one-dimensional tensor."""

    def tolist(self) -> list[float]: ...


class _Encoder(Protocol):
    """The part of a tokeniser that is used here."""

    @property
    def eos_token_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """The grammar that constrains an answer: at most one of these fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        guides = (self.json, self.regex, self.grammar, self.json_object or None, self.structural_tag)
        if sum(guide is not None for guide in guides) > 1:
            raise ValueError("Only one guide can be used for a request.")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Fields, defaults and checks of 1.2.1. Raises ValueError for more than one greedy answer.

    Like the sampler of 1.2.1, the engine silently ignores the seed and all penalties.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: _Vector | None = None
    logits_processor: Callable[..., None] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[str] | None = None
    lookahead_config: object | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stop_words: list[tuple[str, list[int]]] | None = field(default=None, init=False, repr=False)
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        self._validate()

    def _validate(self) -> None:
        best_of = self.best_of or self.n
        if best_of < self.n:
            raise ValueError(f"best_of ({best_of}) cannot be less than n ({self.n})")
        if best_of > 1 and self._greedy_decoding and not self.use_beam_search:
            raise ValueError(f"Greedy decoding does not allow multiple returns: best_of is {best_of}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy_decoding(self) -> bool:
        """Whether decoding is greedy according to this check, which ignores the temperature."""
        return not self.use_beam_search and self.top_k in (None, 1) and self.top_p in (None, 0.0)

    def _setup(self, tokenizer: _Encoder) -> None:
        """Fill in the fields that depend on the tokeniser. Called only for objects without an end_id."""
        self.end_id = tokenizer.eos_token_id
        if self.pad_id is None:
            self.pad_id = self.end_id
        strings = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self._stop_words = [(text, tokenizer.encode(text)) for text in strings]

    def _stops(self) -> list[tuple[str | int, list[int]]]:
        """The stop reasons and their token ids. Raises RuntimeError for strings that were not encoded."""
        if self.stop and self._stop_words is None:
            raise RuntimeError(f"{self.stop=} is not processed by tokenizer")
        words: list[tuple[str | int, list[int]]] = [(token, [token]) for token in self.stop_token_ids or ()]
        return [*words, *(self._stop_words or ())]
