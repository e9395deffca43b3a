"""The form of an answer comes back from the worker as it was, or is refused with a reason."""

from typing import Any

import pytest

from services.core.call import Told
from services.core.errors import Failure, Reason
from services.core.generation.presentation import Presentation
from services.frontend.api.openai.form import decode_form, encode_form
from services.frontend.api.openai.responses import ChatAnswer, CompletionAnswer
from tests.support.doubles import make_request


def no_vocabulary() -> Any:
    raise AssertionError("only log probabilities and echoed prompts need it")


def presentation(endpoint: str, form: bytes) -> Presentation:
    return Presentation(
        request=make_request(),
        request_id="r",
        endpoint=endpoint,
        is_streamed=True,
        counts_prompt=False,
        migration_limit=None,
        grace_s=1.0,
        form=form,
    )


def decoded(endpoint: str, form: bytes) -> Any:
    return decode_form(presentation(endpoint, form), "a" * 32, Told(), no_vocabulary)


@pytest.mark.parametrize(
    ("endpoint", "answer_type"), [("completions", CompletionAnswer), ("chat_completions", ChatAnswer)]
)
def test_answer_comes_back_as_it_was(endpoint: str, answer_type: Any) -> None:
    answer = answer_type(
        request_id="r", model="m", n=2, includes_usage=True, has_usage_in_events=True, returns_token_ids=True, created=7
    )

    back = decoded(endpoint, encode_form(answer))

    assert type(back) is answer_type
    assert encode_form(back) == encode_form(answer)
    assert back.generation_id == "a" * 32


@pytest.mark.parametrize("form", [b"", b"\x80", b"not msgpack"], ids=["nothing", "a field is missing", "no form"])
def test_form_of_another_version_is_refused_as_such(form: bytes) -> None:
    """A bug: it was INTERNAL, which tells a client not to try the next frontend."""
    with pytest.raises(Failure, match="begun by a frontend of another version") as caught:
        decoded("completions", form)

    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


def test_answer_that_was_begun_over_grpc_is_refused_with_what_to_do() -> None:
    with pytest.raises(Failure, match=r"resume it with Inference\.Resume") as caught:
        decoded("generate", b"")

    assert caught.value.reason is Reason.INVALID_ARGUMENT
