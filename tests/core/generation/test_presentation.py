"""A presentation: whatever a request is, the frontend that resumes it gets the very same one."""

import msgspec
import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor
from services.core.generation.kept import Generation, Kept
from services.core.generation.presentation import decode_presentation, encode_presentation, resumed_call
from services.core.request import Guided, GuidedKind, Request, Sampling
from services.core.tenant import Tenant
from tests.support.doubles import make_request

SAMPLED = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    seed=2**63 - 1,
    presence_penalty=-1.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias=((7, -100.0), (2**31, 1.5)),
)
KINDS = {
    "plain": make_request(),
    "sampled": make_request(sampling=SAMPLED),
    "without seed": make_request(sampling=Sampling(temperature=1.0)),
    "stops": make_request(strings=("\n", "漢", "\U0001f600"), stop_token_ids=(7,), min_tokens=2, ignore_eos=True),
    "log probabilities": make_request(logprobs=0),
    "several choices": make_request(n=3),
    "continued": make_request(generated_token_ids=(5, 6)),
    "continued choices": make_request(n=3, generated_choices=((5,), None, ())),
    "several prompts": make_request(token_ids=None, parts=(make_request((1,), n=2), make_request((2, 3), n=2)), n=2),
    "guided": make_request(guided=Guided(GuidedKind.CHOICE, ("yes", "no"))),
    "empty prompt": make_request(()),
}


def call_of(**fields: object) -> Call:
    kept = Kept(generation=Generation(bytes(16), 12.5, is_told=True))
    return Call(request_id="r", kept=kept, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_comes_back_as_it_was(kind: str) -> None:
    request: Request = KINDS[kind]

    presentation = decode_presentation(encode_presentation(request, call_of(), b"form"))

    assert presentation.request == request


def test_all_fields_of_a_request_are_in_one_of_the_kinds() -> None:
    """Otherwise a new field could get lost unnoticed. `text` and `messages` do not reach the layer that encodes."""
    set_in_one = {
        name
        for request in KINDS.values()
        for name in Request.__struct_fields__
        if getattr(request, name) != getattr(Request(model=""), name)
    }

    assert set_in_one | {"text", "messages", "choice"} == set(Request.__struct_fields__)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"endpoint": "chat_completions", "is_streamed": False, "counts_prompt": True, "migration_limit": 0},
        {"migration_limit": 2},
    ],
)
def test_what_the_call_says_comes_back_too(fields: dict[str, object]) -> None:
    call = call_of(**fields)

    presentation = decode_presentation(encode_presentation(make_request(), call, b"\x00\xff"))

    assert presentation.request_id == "r"
    assert (presentation.endpoint, presentation.is_streamed) == (call.endpoint, call.is_streamed)
    assert (presentation.counts_prompt, presentation.migration_limit) == (call.counts_prompt, call.migration_limit)
    assert (presentation.grace_s, presentation.form) == (12.5, b"\x00\xff")


@pytest.mark.parametrize("foreign", [b"", b"\xc1", msgspec.msgpack.encode({"request": 1}), b"\x80", b"\x90"])
def test_presentation_of_another_version_is_refused(foreign: bytes) -> None:
    with pytest.raises(Failure) as caught:
        decode_presentation(foreign)

    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


def test_field_that_a_later_version_adds_does_not_matter() -> None:
    fields = msgspec.msgpack.decode(encode_presentation(make_request(), call_of(), b""))

    presentation = decode_presentation(msgspec.msgpack.encode(fields | {"later": [1]}))

    assert presentation.request == make_request()


def test_call_of_a_found_answer_is_that_of_its_first_request_with_the_clients_cursor() -> None:
    tenant = Tenant(name="acme")
    first = call_of(
        tenant=tenant, endpoint="chat_completions", is_streamed=False, counts_prompt=True, migration_limit=2
    )
    generation, cursor = Generation(bytes(16), 12.5, is_told=True), Cursor((3,), (False,), 7)

    presentation = decode_presentation(encode_presentation(make_request(), first, b"form"))
    call = resumed_call(presentation, generation, cursor, 99.0, tenant)

    assert call.tenant is tenant
    assert (call.request_id, call.endpoint, call.is_streamed) == ("r", "chat_completions", False)
    assert (call.counts_prompt, call.migration_limit, call.deadline) == (True, 2, 99.0)
    assert call.kept == Kept(generation=generation, form=b"form", cursor=cursor)
