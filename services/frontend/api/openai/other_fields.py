"""What happens to the fields of other servers' APIs that this version does not honour: the one table of them.

Its rows are the request fields of OpenAI, vLLM, SGLang, llama.cpp's server, Hugging Face's TGI, LM Studio, Ollama,
TensorRT-LLM, text-generation-webui and Dynamo. The fields that are honoured are those of the structs in bodies.py and
guided.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Other:
    """A field that is not honoured.

    `neutral`: values that ask for nothing, which are accepted; any other value is refused by name. null is always
    accepted. `has_no_effect`: every value is accepted, because the answer is the same. `use`: what to use instead.
    `neutral_like`: a field whose value asks for nothing here either. `detail_of`: other fields, with the values that
    turn them off; if all are off, every value is accepted.
    """

    neutral: tuple[Any, ...] = ()
    has_no_effect: bool = False
    use: str = ""
    neutral_like: str = ""
    detail_of: Mapping[str, Any] = field(default_factory=dict)


Others = Mapping[str, Other]


def at(*neutral: Any, use: str = "") -> Other:
    """Accepted only at these values."""
    return Other(neutral, use=use)


NO_EFFECT = Other(has_no_effect=True)
NEVER = Other()

_SDK = "fields of the body: extra_body is an argument of OpenAI's SDK, which puts them there"
_HEADER = "the header X-Request-Id"
_LIMIT = "max_tokens"
_FORM = "response_format"
_PENALTY = "repetition_penalty, which counts all tokens of the answer and none of the prompt"
_WINDOW = Other(detail_of={"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1})

_LABELS: Others = dict.fromkeys(
    (
        *("metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "n_cache_reuse"),
        *("keep_alive", "ttl", "store", "session_id"),
    ),
    NO_EFFECT,
)
"""What an operator reads, or what only changes how long an answer takes."""

_DEPENDENT: Others = dict.fromkeys(
    (
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "adaptive_decay"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("n_keep", "n_discard"),
        *("length_penalty", "early_stopping"),  # These shape a beam search.
        *("draft_model", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        *("smoothing_curve", "dynatemp_low", "dynatemp_high", "prompt_lookup_num_tokens", "static_cache"),
        "models",  # Others to ask if the first fails.
        *("parallel_tool_calls", "return_mm_kwargs", "return_token_offsets", "stream_interval"),
        "return_flat_raw_top_logprobs_b64",
    ),
    NO_EFFECT,
)
"""Details of something that is refused where it is turned on, that never happens here, or that changes no text."""

_SAMPLING: Others = {
    "best_of": Other((1,), neutral_like="n"),
    "beam_width": at(1),
    "num_beams": at(1),
    "use_beam_search": at(False),
    "do_sample": at(use="temperature"),
    "greed_sampling": at(False, use="temperature"),
    "greedy": at(False, use="temperature"),
    "typical_p": at(1),
    "typ_p": at(1),
    "tfs_z": at(1),
    "top_a": at(0),
    "top_n_sigma": at(-1, 0),
    "top_p_min": at(0),
    "top_p_decay": at(1),
    "min_keep": at(0, 1),
    "epsilon_cutoff": at(0),
    "eta_cutoff": at(0),
    "adaptive_target": at(-1),
    "dynatemp_range": at(0),
    "dynamic_temperature": at(False),
    "smoothing_factor": at(0),
    "mirostat": at(0),
    "mirostat_mode": at(0),
    "xtc_probability": at(0),
    "dry_multiplier": at(0),
    "repeat_penalty": at(1, use=_PENALTY),
    "repeat_last_n": _WINDOW,
    "repetition_penalty_range": _WINDOW,
    "encoder_repetition_penalty": at(1),
    "penalty_alpha": at(0),
    "guidance_scale": at(1),
    "negative_prompt": at(""),
    "typical": at(1),
    "tfs": at(1),
    "custom_token_bans": at("", use="logit_bias"),
    "preset": NEVER,
    "penalize_nl": at(True),
    "penalty_prompt": NEVER,
    "prompt_ignore_length": at(0),
    "no_repeat_ngram_size": at(0),
    "repetition_detection": NEVER,
    "samplers": NEVER,
    "sampler_seq": NEVER,
    "sampler_priority": NEVER,
    "temp": at(use="temperature"),
    "temperature_last": at(False),
    "backend_sampling": at(False),
    "allowed_token_ids": at(use="logit_bias"),
    "bad_words": at([]),
    "banned_tokens": at([]),
    "logits_processors": at([]),
    "custom_logit_processor": NEVER,
    "custom_params": at({}),
    "watermark": at(False),
    "watermarking": at(False),
    "random_seed": at(use="seed"),
    "n_cmpl": at(1, use="n"),
    "num_return_sequences": at(1, use="n"),
    "num_completions": at(1, use="n"),
    "lora": at([]),
    "lora_path": NEVER,
    "lora_request": NEVER,
    "adapter_id": NEVER,
    "adapter_source": NEVER,
    "custom_llm_provider": NEVER,
}

_LENGTH_AND_STOP: Others = {
    "num_predict": at(use=_LIMIT),
    "max_output_tokens": at(use=_LIMIT),
    "max_tokens_to_sample": at(use=_LIMIT),
    "max_gen_len": at(use=_LIMIT),
    "max_length": at(use=_LIMIT),
    "auto_max_new_tokens": at(False),
    "max_tokens_second": at(0),
    "min_length": at(0, use="min_tokens"),
    "min_new_tokens": at(0, use="min_tokens"),
    "n_indent": at(0),
    "t_max_predict_ms": at(0, -1, use="the header X-Request-Timeout"),
    "timeout": at(use="the header X-Request-Timeout"),
    "num_ctx": NEVER,
    "context_length": NEVER,
    "truncate_prompt_tokens": NEVER,
    "truncation_side": NEVER,
    "truncate": NEVER,
    "truncation_length": NEVER,
    "stop_sequences": at([], use="stop"),
    "stop_words": at([], use="stop"),
    "stop_strings": at([], use="stop"),
    "stop_regex": at([]),
    "no_stop_trim": at(False),
    "include_stop_str_in_output": at(False),
    "ignore_eos_token": at(False, use="ignore_eos"),
    "ban_eos_token": at(False, use="min_tokens"),
    "thinking_token_budget": at(-1),
    "thinking_budget": NEVER,
    "max_thinking_tokens": NEVER,
    "reasoning_budget": at(-1),
    "reasoning_budget_tokens": at(-1),
}

_FORMS: Others = {
    "format": at("", use=_FORM),
    "response_schema": at(use=_FORM),
    "schema": at(use=_FORM),
    "grammar_string": at("", use="grammar"),
    "grammar_type": NEVER,
    "grammar_lazy": at(False),
    "grammar_triggers": at([]),
    "preserved_tokens": at([]),
    "structural_tag": NEVER,
    "guided_decoding": NEVER,
    "guided_decoding_backend": NEVER,
    "guided_decoding_disable_fallback": NO_EFFECT,
    "guided_json_object": at(False, use=_FORM),
    "guided_whitespace_pattern": NEVER,
    "guided_decoding_disable_any_whitespace": at(False),
    "guided_decoding_disable_additional_properties": at(False),
}

_PROMPT: Others = {
    "suffix": at(""),
    "input": at(use="messages or prompt"),
    "inputs": at(use="messages or prompt"),
    "input_ids": at(use="a list of token ids as prompt"),
    "prompt_token_ids": at(use="a list of token ids as prompt"),
    "prompt_token_ids_b64": at(use="a list of token ids as prompt"),
    "token_data": at(use="a list of token ids as prompt"),
    "prompt_embeds": NEVER,
    "images": at([]),
    "image_data": at([]),
    "modalities": at(["text"]),
    "audio": NEVER,
    "images_config": NEVER,
    "video_config": NEVER,
    "max_dynamic_patch": NEVER,
    "min_dynamic_patch": NEVER,
    "use_audio_in_video": at(False),
    "mm_processor_kwargs": at({}),
    "media_io_kwargs": at({}),
    "multi_modal_data": at({}),
    "documents": at([]),
    "context": at([]),
    "template": at(""),
    "system": at("", use="a message with the role system"),
    "instructions": at("", use="a message with the role system"),
    "raw": at(False),
    "use_raw_prompt": at(False),
    "chat_template": NEVER,
    "chat_template_kwargs": at({}),
    "injected_chat_template_kwargs": at([]),
    "generation_prompt": NEVER,
    "add_generation_prompt": at(True),
    "add_bos_token": at(True),
    "continue_final_message": at(False),
    "guideline": NEVER,
    "tool_prompt": NEVER,
    "task": NEVER,
    "safe_prompt": at(False),
    "skip_special_tokens": at(True),
    "spaces_between_special_tokens": at(True),
    "detokenize": at(True),
}

_REASONING: Others = {
    "reasoning_effort": NEVER,
    "reasoning": at({}),
    "thinking": NEVER,
    "think": NEVER,
    "enable_thinking": NEVER,
    "thinking_forced_open": at(False),
    "include_reasoning": at(True),
    "separate_reasoning": at(False),
    "stream_reasoning": at(True),
    "reasoning_format": at("none"),
    "reasoning_in_content": at(True),
    "reasoning_control": at(False),
    "reasoning_budget_start_tag": NEVER,
    "reasoning_budget_end_tag": NEVER,
    "reasoning_budget_end_tags": NEVER,
    "reasoning_budget_message": NEVER,
    "verbosity": at("medium"),
}

_TOOLS: Others = {
    "tools": at([]),
    "tool_choice": at("none", "auto"),
    "functions": at([]),
    "function_call": at("none", "auto"),
    "parse_tool_calls": at(False),
    "web_search_options": NEVER,
    "plugins": at([]),
    "moderation": NEVER,
    "prediction": NEVER,
}

_ANSWER: Others = {
    "prompt_logprobs": NEVER,
    "logprob_token_ids": NEVER,
    "n_probs": at(0, use="logprobs"),
    "post_sampling_probs": at(False),
    "top_n_tokens": at(0, use="logprobs"),
    "details": at(False),
    "decoder_input_details": at(False),
    "return_full_text": at(False, use="echo"),
    "return_tokens": at(False, use="return_token_ids"),
    "return_tokens_as_token_ids": at(False),
    "return_prompt_text": at(False),
    "return_prompt_token_ids": at(False, use="return_token_ids"),
    "return_assistant_tokens_mask": at(False),
    "return_meta_info": at(False),
    "return_hidden_states": at(False),
    "return_routed_experts": at(False),
    "routed_experts_start_len": at(0),
    "routed_experts_prompt_start": at(0),
    "return_cached_tokens_details": at(False),
    "return_spec_tokens_details": at(False),
    "return_input_ids_in_sglext": at(False),
    "return_output_ids_in_sglext": at(False),
    "return_sampling_mask": at(False),
    "return_flat_raw_output_top_logprobs": at(False),
    "sampling_logprobs_mode": NEVER,
    "return_context_logits": at(False),
    "return_generation_logits": at(False),
    "return_perf_metrics": at(False),
    "return_progress": at(False),
    "timings_per_token": at(False),
    "response_fields": at([]),
    "sse_ping_interval": at(-1),
    "verbose": at(False),
    "_debug_render_only": at(False),
    "chat_format": NEVER,
    "chat_parser": NEVER,
}

_PLACE_AND_ORDER: Others = {
    "priority": at(0),
    "request_id": at(use=_HEADER),
    "rid": at(use=_HEADER),
    "session_params": at({}),
    "conversation_params": NEVER,
    "agent_hierarchy": NEVER,
    "id_slot": at(-1),
    "cache_salt": NEVER,
    "extra_key": NEVER,
    "ngram_corpus_id": NEVER,
    "custom_labels": at({}),
    "data_parallel_rank": NEVER,
    "routed_dp_rank": NEVER,
    "disagg_prefill_dp_rank": NEVER,
    "bootstrap_host": NEVER,
    "bootstrap_port": NEVER,
    "bootstrap_room": NEVER,
    "disaggregated_params": NEVER,
    "kv_transfer_params": at({}),
    "ec_transfer_params": at({}),
    "vllm_xargs": at({}),
    "nvext": at({}, use="its fields as fields of the body"),
}

_ENVELOPES: Others = {
    "options": at({}, use="its fields as fields of the body"),
    "parameters": at({}, use="its fields as fields of the body"),
    "extra_body": at({}, use=_SDK),
    "extra_query": at({}),
    "extra_headers": at({}, use="headers: extra_headers is an argument of OpenAI's SDK"),
}

_BOTH: Others = {
    **_LABELS,
    **_DEPENDENT,
    **_SAMPLING,
    **_LENGTH_AND_STOP,
    **_FORMS,
    **_PROMPT,
    **_REASONING,
    **_TOOLS,
    **_ANSWER,
    **_PLACE_AND_ORDER,
    **_ENVELOPES,
}

IN_CHAT: Others = {
    **_BOTH,
    "echo": at(False),
    "prompt": at(use="messages, or /v1/completions"),
    "add_special_tokens": at(False),
}
"""Fields of a body of /v1/chat/completions."""

IN_COMPLETION: Others = {
    **_BOTH,
    "messages": at(use="prompt, or /v1/chat/completions"),
    "top_logprobs": at(0, use="logprobs"),
    "add_special_tokens": at(True),
}
"""Fields of a body of /v1/completions."""

IN_MESSAGE: Others = {
    **dict.fromkeys(("annotations", "cache_control", "provider_specific_fields"), NO_EFFECT),
    "tool_calls": at([]),
    "tool_call_id": at(""),
    "tool_name": at(""),
    "tools": at([]),
    "function_call": NEVER,
    "audio": NEVER,
    "images": at([]),
    "refusal": at(""),
    "reasoning": at(""),
    "reasoning_content": at(""),
    "reasoning_details": at([]),
    "thinking": at(""),
    "thinking_blocks": at([]),
    "prefix": at(False),
    "partial": at(False),
    "text": at("", use="content"),
}
"""Fields of one of the `messages`."""

IN_PART: Others = dict.fromkeys(("annotations", "cache_control", "prompt_cache_breakpoint"), NO_EFFECT)
"""Fields of a text part in a message's `content`."""

IN_STREAM_OPTIONS: Others = {"include_obfuscation": at(False)}

IN_RESPONSE_FORMAT: Others = {}

IN_JSON_SCHEMA: Others = {}
"""Fields of `response_format.json_schema`."""

IN_STRUCTURED_OUTPUTS: Others = {
    "structural_tag": NEVER,
    "whitespace_pattern": NEVER,
    "disable_any_whitespace": at(False),
    "disable_additional_properties": at(False),
    "disable_fallback": NO_EFFECT,
}
