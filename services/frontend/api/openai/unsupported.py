"""Fields of OpenAI and vLLM that this version does not support. They are refused by name, never ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.core.errors import invalid

Neutral = Mapping[str, tuple[Any, ...]]
"""Field → values that change nothing, which are accepted. null is always accepted."""

NEUTRAL: Neutral = {
    "best_of": (1,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "priority": (0,),
    "session_id": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "nvext": ({},),
}

NEUTRAL_IN_CHAT: Neutral = {**NEUTRAL, "echo": (False,)}

NEUTRAL_IN_COMPLETION: Neutral = {**NEUTRAL, "top_logprobs": (0,)}

NEUTRAL_IN_STRUCTURED_OUTPUTS: Neutral = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}

NEUTRAL_IN_MESSAGE: Neutral = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}


def refuse_unsupported(given: Mapping[str, msgspec.Raw], neutral: Neutral, *, path: str = "") -> None:
    """Raises Failure(INVALID_ARGUMENT) for the first unsupported field, in alphabetical order, that is not neutral."""
    for name in sorted(given.keys() & neutral.keys()):
        if not _is_neutral(given[name], neutral[name]):
            raise invalid(path + name, f"{path}{name} is not supported in this version: {_advice(neutral[name])}")


def _is_neutral(given: msgspec.Raw, accepted: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(given)
    except (msgspec.ValidationError, RecursionError):
        return False  # A number that is too large to decode, or too many brackets.
    return value is None or any(_same(value, one) for one in accepted)


def _same(value: Any, accepted: Any) -> bool:
    # False == 0 in Python, but `logprobs: 0` asks for log probabilities and `logprobs: false` does not.
    return (value is True or value is False) == isinstance(accepted, bool) and bool(value == accepted)


def _advice(accepted: tuple[Any, ...]) -> str:
    if not accepted:
        return "leave it out"
    return f"leave it out or set it to {msgspec.json.encode(accepted[0]).decode()}"
