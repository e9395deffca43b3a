"""What becomes of a request whose client leaves: its own headers say it, otherwise the operator."""

import re
import uuid
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.generation.kept import Kept
from services.core.generation.wish import DETACH_GRACE_S_MAX, KeepConfig, kept_of, parse_generation_id
from services.core.tenant import EVERYBODY

UUID = "01234567-89AB-cdef-0123-456789abcdef"
UUID_BYTES = uuid.UUID(UUID).bytes
CONTINUE = {"x-on-disconnect": "continue"}


def kept(headers: dict[str, str], request_id: str = "r", *, is_id_given: bool = True, **config: Any) -> Kept | None:
    return kept_of(headers, request_id, KeepConfig(**config), EVERYBODY, is_id_given=is_id_given)


@pytest.mark.parametrize(
    ("header", "default", "is_kept"),
    [
        (None, "cancel", False),
        (None, "continue", True),
        ("continue", "cancel", True),
        ("cancel", "continue", False),
        (" Continue ", "cancel", True),
    ],
)
def test_header_comes_before_the_default_of_the_operator(header: str | None, default: str, is_kept: bool) -> None:
    headers = {} if header is None else {"x-on-disconnect": header}

    assert (kept(headers, on_disconnect=default) is not None) is is_kept


@pytest.mark.parametrize("header", ["", "keep", "continue, cancel", "true", "CONTINUE\u200b"])
def test_other_wishes_are_refused_by_name(header: str) -> None:
    with pytest.raises(Failure) as caught:
        kept({"x-on-disconnect": header})

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "X-On-Disconnect")


@pytest.mark.parametrize(
    ("header", "grace_s"), [(None, 12.0), ("30", 30.0), ("1m30s", 90.0), ("500ms", 0.5), (" 2s ", 2.0)]
)
def test_grace_is_that_of_the_client_or_the_default(header: str | None, grace_s: float) -> None:
    headers = CONTINUE if header is None else CONTINUE | {"x-detach-grace": header}

    asked = kept(headers, grace_s=12.0)

    assert asked is not None
    assert asked.generation.grace_s == grace_s


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "1e9", "", "soon", f"{DETACH_GRACE_S_MAX + 1:.0f}"])
@pytest.mark.parametrize("wish", ["cancel", "continue"])
def test_other_graces_are_refused_by_name(header: str, wish: str) -> None:
    with pytest.raises(Failure) as caught:
        kept({"x-on-disconnect": wish, "x-detach-grace": header})

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "X-Detach-Grace")


@pytest.mark.parametrize("request_id", [UUID, UUID.replace("-", ""), UUID.upper()])
@pytest.mark.parametrize("is_id_given", [True, False])
def test_random_request_id_is_the_id_of_the_answer_and_its_client_knows_it(request_id: str, is_id_given: bool) -> None:
    asked = kept(CONTINUE, request_id, is_id_given=is_id_given)

    assert asked is not None
    assert (asked.generation.id, asked.generation.is_told) == (UUID_BYTES, is_id_given)


def test_request_id_that_others_may_guess_is_no_id_of_an_answer() -> None:
    first, second = kept(CONTINUE, "order-17"), kept(CONTINUE, "order-17")

    assert first is not None
    assert second is not None
    assert not first.generation.is_told
    assert first.generation.id != second.generation.id
    assert len(first.generation.id) == 16


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
@pytest.mark.parametrize("bare", [UUID, UUID.replace("-", ""), UUID.upper()])
def test_answer_is_named_by_its_id_with_or_without_its_prefix(prefix: str, bare: str) -> None:
    assert parse_generation_id(prefix + bare, "id") == UUID_BYTES


@pytest.mark.parametrize(
    "hostile", ["", "chatcmpl-", "r-1", UUID + "0", f"chatcmpl-cmpl-{UUID}", f"{{{UUID}}}", f"{UUID}\n", f" {UUID}"]
)
def test_other_ids_are_refused_by_name(hostile: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_generation_id(hostile, "generation_id")

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "generation_id")


@given(st.from_regex(re.compile(r"(chatcmpl-|cmpl-)?[0-9a-fA-F-]{0,40}"), fullmatch=True) | st.text(max_size=50))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with suppress(Failure):
        parsed = parse_generation_id(text, "id")
        assert len(parsed) == 16
        assert parsed.hex() in text.replace("-", "").lower()
