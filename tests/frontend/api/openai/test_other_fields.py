"""Every request field of a known server is honoured, has no effect, or is refused by name: none is dropped."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.core.errors import Failure
from services.core.request import Request
from services.frontend.api.openai.bodies import Body
from services.frontend.api.openai.parse import (
    CHAT,
    COMPLETION,
    JSON_SCHEMA,
    MESSAGE,
    PART,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    parse_chat,
    parse_completion,
)
from services.frontend.api.openai.unsupported import Place

Parse = Callable[[bytes], Body]

MINIMAL: dict[Parse, dict[str, Any]] = {
    parse_chat: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    parse_completion: {"model": "m", "prompt": "hi"},
}
PLACES: dict[Parse, Place] = {parse_chat: CHAT, parse_completion: COMPLETION}

SERVERS = {
    "OpenAI's chat": """
        messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
        stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options""",
    "OpenAI's completions": """
        model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user""",
    "vLLM": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty guided_choice
        guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
        include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
        mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt prompt_embeds prompt_logprobs
        reasoning_effort repetition_detection repetition_penalty request_id response_format
        return_assistant_tokens_mask return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
        return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structural_tag
        structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking""",
    "SGLang": """
        best_of bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
        custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key
        frequency_penalty ignore_eos images_config input_ids json_schema logit_bias logprobs lora_path
        max_completion_tokens max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens model n
        ngram_corpus_id no_stop_trim parallel_tool_calls presence_penalty priority prompt reasoning reasoning_effort
        regex repetition_penalty response_format return_cached_tokens_details return_hidden_states return_meta_info
        return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_input_ids_in_sglext
        return_output_ids_in_sglext return_prompt_token_ids return_routed_experts return_sampling_mask
        return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len sampling_logprobs_mode
        seed separate_reasoning session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream
        stream_options stream_reasoning suffix task temperature tool_choice tools top_k top_logprobs top_p
        use_audio_in_video user video_config watermark""",
    "llama.cpp's server": """
        adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt chat_format chat_parser
        chat_template_kwargs continue_final_message dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
        dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty generation_prompt grammar
        grammar_lazy grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias logprobs lora
        max_completion_tokens max_tokens messages min_keep min_p mirostat mirostat_eta mirostat_tau model n
        n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parallel_tool_calls parse_tool_calls
        post_sampling_probs presence_penalty preserved_tokens prompt reasoning_budget_end_tag reasoning_budget_end_tags
        reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control reasoning_format
        repeat_last_n repeat_penalty response_fields response_format return_progress return_tokens samplers seed
        speculative.n_max speculative.n_min speculative.p_min sse_ping_interval stop stream stream_options
        t_max_predict_ms temperature tfs_z thinking_forced_open timings_per_token tool_choice tools top_k top_logprobs
        top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold""",
    "TGI": """
        adapter_id best_of decoder_input_details details do_sample frequency_penalty guideline inputs logit_bias
        logprobs max_new_tokens max_tokens messages model n parameters presence_penalty prompt repetition_penalty
        response_format return_full_text seed stop stream stream_options suffix temperature tool_choice tool_prompt
        tools top_k top_logprobs top_n_tokens top_p truncate typical_p watermark""",
    "LM Studio": """
        draft_model frequency_penalty logit_bias max_tokens messages model presence_penalty repeat_penalty seed stop
        stream temperature top_k top_p ttl""",
    "Ollama": """
        _debug_render_only context format frequency_penalty images keep_alive max_tokens messages model options
        presence_penalty prompt raw reasoning reasoning_effort response_format seed stop stream stream_options suffix
        system temperature template think tools top_p""",
    "TensorRT-LLM": """
        add_generation_prompt add_special_tokens agent_hierarchy best_of cache_salt chat_template chat_template_kwargs
        conversation_params detokenize disaggregated_params documents early_stopping echo frequency_penalty ignore_eos
        include_stop_str_in_output injected_chat_template_kwargs length_penalty logit_bias logprobs lora_request
        max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_processor_kwargs model n
        parallel_tool_calls presence_penalty priority prompt prompt_ignore_length prompt_token_ids prompt_token_ids_b64
        reasoning_effort repetition_penalty response_format return_context_logits seed skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_options suffix temperature thinking
        thinking_token_budget tool_choice tools top_k top_logprobs top_p top_p_min truncate_prompt_tokens
        use_beam_search user""",
    "Dynamo": """
        greed_sampling guided_choice guided_decoding_backend guided_grammar guided_json guided_regex ignore_eos
        include_stop_str_in_output max_thinking_tokens min_tokens nvext repetition_penalty token_data top_k
        use_raw_prompt""",
    "text-generation-webui": """
        adaptive_decay adaptive_target add_bos_token auto_max_new_tokens ban_eos_token custom_token_bans do_sample
        dry_allowed_length dry_base dry_multiplier dry_sequence_breakers dynamic_temperature dynatemp_exponent
        dynatemp_high dynatemp_low enable_thinking encoder_repetition_penalty epsilon_cutoff eta_cutoff grammar_string
        guidance_scale max_tokens_second min_p mirostat_eta mirostat_mode mirostat_tau negative_prompt
        no_repeat_ngram_size penalty_alpha preset prompt_lookup_num_tokens repetition_penalty repetition_penalty_range
        sampler_priority seed skip_special_tokens smoothing_curve smoothing_factor static_cache temperature_last tfs
        top_a top_k top_n_sigma truncation_length typical typical_p xtc_probability xtc_threshold""",
    "arguments of OpenAI's SDK": "extra_body extra_headers extra_query timeout",
}
"""The fields of requests for completions and chats, in 2026."""

REFUSED = [
    (parse, name)
    for parse, place in PLACES.items()
    for name, other in place.others.items()
    if not (other.has_no_effect or other.detail_of)
]
ACCEPTED = [
    (parse, name, value)
    for parse, place in PLACES.items()
    for name, other in place.others.items()
    for value in ((5, "x", {"a": [1]}, False) if other.has_no_effect else other.neutral)
]
ASKS_FOR_SOMETHING = {"asks": "for something"}


def asked(parse: Parse, **fields: Any) -> Request:
    return parse(json.dumps(MINIMAL[parse] | fields).encode()).to_request()


def refusal(parse: Parse, **fields: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        asked(parse, **fields)
    return caught.value


@pytest.mark.parametrize("parse", PLACES)
@pytest.mark.parametrize("server", SERVERS)
def test_every_field_of_every_server_is_decided(server: str, parse: Parse) -> None:
    place = PLACES[parse]

    assert [name for name in SERVERS[server].split() if name not in place.honoured | place.others.keys()] == []


@pytest.mark.parametrize(("parse", "name"), REFUSED)
def test_field_that_asks_for_something_is_refused_by_name(parse: Parse, name: str) -> None:
    failure = refusal(parse, **{name: ASKS_FOR_SOMETHING})

    assert failure.param == name
    assert failure.detail.startswith(f"{name} is not supported in this version: leave it out")


@pytest.mark.parametrize(("parse", "name", "value"), ACCEPTED)
def test_value_that_asks_for_nothing_changes_nothing(parse: Parse, name: str, value: Any) -> None:
    assert asked(parse, **{name: value}) == asked(parse)


@pytest.mark.parametrize("parse", PLACES)
def test_null_asks_for_nothing(parse: Parse) -> None:
    assert asked(parse, **dict.fromkeys(PLACES[parse].others)) == asked(parse)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", True),
        ("best_of", 0),
        ("priority", -1),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("reasoning_effort", "none"),
        ("think", False),
        ("mirostat", 2),
        ("repeat_penalty", 1.1),
        ("typical_p", 0.5),
        ("options", {"num_predict": 5}),
        ("extra_body", {"top_k": 5}),
        ("nvext", {"ignore_eos": True}),
        ("skip_special_tokens", False),
    ],
)
@pytest.mark.parametrize("parse", PLACES)
def test_real_value_is_refused_by_name(parse: Parse, name: str, value: Any) -> None:
    assert refusal(parse, **{name: value}).param == name


def test_special_tokens_are_added_to_prompts_and_not_to_chats() -> None:
    """Bug: a chat with `add_special_tokens: true` was answered without them."""
    assert asked(parse_completion, add_special_tokens=True) == asked(parse_completion)
    assert asked(parse_chat, add_special_tokens=False) == asked(parse_chat)
    assert refusal(parse_completion, add_special_tokens=False).param == "add_special_tokens"
    assert refusal(parse_chat, add_special_tokens=True).param == "add_special_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 1.2),
        ("early_stopping", "never"),
        ("session_id", "a-chat-of-a-user"),
        ("top_n_sigma", 0),
        ("min_keep", 1),
        ("stop_regex", []),
        ("verbosity", "medium"),
        ("repeat_last_n", 64),
        ("repetition_penalty_range", 1024),
        ("encoder_repetition_penalty", 1.0),
        ("smoothing_curve", 1),
        ("auto_max_new_tokens", False),
    ],
)
@pytest.mark.parametrize("parse", PLACES)
def test_setting_of_something_that_is_off_changes_nothing(parse: Parse, name: str, value: Any) -> None:
    """Bug: clients that send the defaults of their server with each request were shut out."""
    assert asked(parse, **{name: value}) == asked(parse)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("parse", PLACES)
def test_window_of_penalties_is_refused_with_a_penalty(parse: Parse, penalty: str) -> None:
    refused = refusal(parse, repeat_last_n=64, **{penalty: 0.5})

    assert refused.param == "repeat_last_n"
    assert "with presence_penalty, frequency_penalty or repetition_penalty" in refused.detail
    assert asked(parse, repeat_last_n=64, **{penalty: None}) == asked(parse)
    off = 1 if penalty == "repetition_penalty" else 0
    assert asked(parse, repeat_last_n=64, **{penalty: off}) == asked(parse)


@pytest.mark.parametrize("parse", PLACES)
def test_best_of_as_many_answers_as_are_given_is_accepted(parse: Parse) -> None:
    assert asked(parse, n=3, best_of=3) == asked(parse, n=3)
    assert asked(parse, n=3, best_of=3.0) == asked(parse, n=3)
    assert refusal(parse, n=3, best_of=4).param == "best_of"
    assert refusal(parse, best_of=3).param == "best_of"
    assert "or set it to 1 or to the value of n" in refusal(parse, best_of=3).detail


@pytest.mark.parametrize("name", ["tool_call_id", "tool_name"])
def test_empty_name_of_a_tool_in_a_message_is_accepted(name: str) -> None:
    """Bug: programs in typed languages, which write empty strings, were shut out."""
    empty = {"role": "user", "content": "hi", name: ""}

    assert asked(parse_chat, messages=[empty]) == asked(parse_chat)
    assert refusal(parse_chat, messages=[empty | {name: "a"}]).param == f"messages[0].{name}"


@pytest.mark.parametrize("parse", PLACES)
def test_refusal_says_what_to_use_instead(parse: Parse) -> None:
    assert "use repetition_penalty" in refusal(parse, repeat_penalty=1.1).detail
    assert "use max_tokens" in refusal(parse, num_predict=5).detail
    assert "the header X-Request-Timeout" in refusal(parse, timeout=5).detail
    assert "an argument of OpenAI's SDK" in refusal(parse, extra_body={"top_k": 1}).detail


def test_field_of_the_other_endpoint_is_refused() -> None:
    assert refusal(parse_chat, prompt="hi").param == "prompt"
    assert refusal(parse_chat, echo=True).param == "echo"
    assert refusal(parse_completion, messages=[{"role": "user", "content": "hi"}]).param == "messages"
    assert refusal(parse_completion, top_logprobs=1).param == "top_logprobs"


@pytest.mark.parametrize(
    "place", [CHAT, COMPLETION, MESSAGE, PART, STREAM_OPTIONS, RESPONSE_FORMAT, JSON_SCHEMA, STRUCTURED_OUTPUTS]
)
def test_no_field_is_both_honoured_and_not(place: Place) -> None:
    """A body that has only honoured fields is not checked for others."""
    assert place.honoured.isdisjoint(place.others)
