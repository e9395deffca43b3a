"""Both protocols ask for the same answer: an exact number of tokens, none of them a part of a character."""

import json

from bench.clients.requests import SPLIT_CHARACTERS, grpc_request, request_body


def test_requests_ask_for_an_exact_number_of_tokens() -> None:
    body, message = json.loads(request_body(7)), grpc_request(7)

    assert (body["max_tokens"], body["min_tokens"]) == (message.stop.max_tokens, message.stop.min_tokens) == (7, 7)
    assert tuple(body["stop_token_ids"]) == tuple(message.stop.token_ids) == SPLIT_CHARACTERS
    assert body["prompt"] == message.text


def test_further_fields_of_the_api_are_passed_on() -> None:
    assert json.loads(request_body(7, stream_options={"include_usage": True}))["stream_options"]["include_usage"]
