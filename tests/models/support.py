"""Chat templates in the idioms of well-known model families, shortened, and vocabularies with their tokens."""

import json
from collections.abc import Sequence
from typing import Any

from services.models.hf_checkpoint import pack
from services.models.tokenizers.byte_level import byte_of_character
from services.models.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.model_folder import byte_fallback_bpe, byte_level_bpe

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{%- for m in turns %}{% if m.role == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% endif %}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}"
    "{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{{ '<start_of_turn>model\n' }}"
)
PHI_3 = (
    "{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}"
    "{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}"
    "{% elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|assistant|>\n' }}"
)
GLM = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n"
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}"
    "{% set content = m['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{{ '<｜Assistant｜>' + content + eos_token }}{% endif %}{% endfor %}{{ '<｜Assistant｜><think>\n' }}"
)
QWEN_3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not"
    " (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role in ['user', 'system'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reasoning = '' %}{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and reasoning %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
WALKING = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}Assistant:"
)
EITHER = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' }}{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
SYSTEM_IN_PARTS = (
    "{% if messages[0].role == 'system' %}<start_of_turn>{{ messages[0].content[0].text }}<end_of_turn>{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<start_of_turn>{{ m.content + '<end_of_turn>' }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA_3,
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
    "Phi-3": PHI_3,
    "GLM": GLM,
    "DeepSeek-R1": DEEPSEEK_R1,
    "Qwen3": QWEN_3,
    "walking over parts": WALKING,
    "either": EITHER,
    "system in parts": SYSTEM_IN_PARTS,
}

BOS, EOS = "<s>", "</s>"
SPECIAL = (
    BOS,
    EOS,
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *(
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|end|>",
        "[gMASK]",
        "<sop>",
        "<image>",
    ),
    *("<｜User｜>", "<｜Assistant｜>"),
)
"""Tokens without text."""
USER_DEFINED = ("<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<tool_response>", "</tool_response>")
"""Tokens with text, which some of the templates use."""
ORDINARY = ("<b>", "\n\n", "  ")
"""Further tokens with text, which no template uses."""


def byte_level_tokenizer(*, normalized: bool = False, **parts: Any) -> HuggingFaceTokenizer:
    """A tokeniser of bytes, and of all added tokens above. `normalized`: they are recognised after normalisation."""
    vocab = {character: byte[0] for character, byte in byte_of_character().items()}
    return _loaded(byte_level_bpe(vocab, [], special={}, **parts), first=256, normalized=normalized)


def sentencepiece_tokenizer(**parts: Any) -> HuggingFaceTokenizer:
    """A tokeniser like Llama 2's, with few words, and of all added tokens above."""
    names = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdeimnorstuy<>|_/",
        "▁a",
        "us",
        "er",
        "user",
    ]
    vocab = {name: token for token, name in enumerate(names)}
    return _loaded(byte_fallback_bpe(vocab, ["▁ a", "u s", "e r", "us er"], {"<unk>": 0}, **parts), first=len(names))


def _loaded(tokenizer: dict[str, Any], first: int, normalized: bool = False) -> HuggingFaceTokenizer:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    for number, name in enumerate((*SPECIAL, *USER_DEFINED, *ORDINARY), first):
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": name in SPECIAL, **flags})
    return HuggingFaceTokenizer(pack(json.dumps(tokenizer).encode(), special_tokens=[], vocab_size=0))


def decoded(tokenizer: HuggingFaceTokenizer, ids: Sequence[int]) -> str:
    """The text of the ids, control tokens included."""
    names = {token: name for name, token in tokenizer.added_tokens.items()}
    return b"".join(names[one].encode() if one in names else tokenizer.token_bytes[one] for one in ids).decode()
