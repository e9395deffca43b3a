"""Fields that OpenAI or vLLM clients know and this version does not honour: refused by name, never ignored."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.core.errors import invalid

Neutral = Mapping[str, tuple[Any, ...]]
"""For each field the values that ask for nothing; null always does."""

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
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "typical_p": (1, 1.0),
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
    """Raises Failure(INVALID_ARGUMENT) for the first field, by name, that asks for what this version cannot do."""
    for name in sorted(given.keys() & neutral.keys()):
        value = msgspec.json.decode(given[name])
        if value is not None and not any(_same(value, harmless) for harmless in neutral[name]):
            raise invalid(path + name, f"{path}{name} is not supported in this version: {_advice(neutral[name])}")


def _same(value: Any, harmless: Any) -> bool:
    # False == 0 in Python, but `logprobs: 0` asks for something and `logprobs: false` does not.
    return type(value) is type(harmless) and value == harmless


def _advice(harmless: tuple[Any, ...]) -> str:
    if not harmless:
        return "leave it out"
    return f"leave it out or set it to {msgspec.json.encode(harmless[0]).decode()}"
