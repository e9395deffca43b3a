"""Prepares a request for a worker: checks it, turns its prompt into token ids, and settles its limits and seed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Finish, Layer, Sink
from services.core.request import Request
from services.core.validation import check_count, check_open, check_request, settle
from services.frontend.model_catalog import Model, ModelCatalog


class Preprocess:
    """Must be above migrate: a continuation needs token ids, and every attempt needs the same seed.

    Several prompts get one seed, so that the client can be told it. Only if a prompt repeats and the client gives no
    seed, each has its own: equal prompts with equal seeds have equal answers.

    `parses_contents`: control tokens that a chat's messages spell are recognised.
    """

    def __init__(
        self, inner: Layer, catalog: ModelCatalog, rng: random.Random, *, parses_contents: bool = False
    ) -> None:
        self._inner = inner
        self._catalog = catalog
        self._rng = rng
        self._parses_contents = parses_contents

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        is_prepared = call.kept is not None and call.kept.generation.is_resumed
        if not is_prepared:
            _check(request)
        model = self._catalog.find(request.model)
        prepared = request if is_prepared else await self._prepare_all(request, model)
        call.told.prompts = [part.prompt_token_ids for part in prepared.parts or (prepared,)]
        if model.card.resume.sampling:
            call.told.seed = _seed_of(prepared)
        return await self._inner(prepared, replace(call, card=model.card), sink)

    async def _prepare_all(self, request: Request, model: Model) -> Request:
        if not request.parts:
            return await self._prepare(request, model)
        size = sum(len(part.text or "") for part in request.parts)
        parts = []
        for index, part in enumerate(request.parts):
            with _naming(index):
                parts.append(await self._prepare(part, model, size))
        if len({part.token_ids for part in parts}) == len(parts):
            seed = parts[0].sampling.seed
            parts = [replace(part, sampling=replace(part.sampling, seed=seed)) for part in parts]
        return replace(request, parts=tuple(parts))

    async def _prepare(self, request: Request, model: Model, size: int = 0) -> Request:
        """`size`: characters of all prompts of the request. Determines whether a helper process is used."""
        if request.token_ids is None:
            size = max(size, _check_characters(request, model))
            prompt = request.text if request.messages is None else request.messages
            assert prompt is not None, "check_request refuses requests without a prompt"
            token_ids = await model.encoder.token_ids(model.card, prompt, size, parses_contents=self._parses_contents)
            request = replace(request, text=None, messages=None, token_ids=token_ids)
        return settle(request, model.card, self._rng)


def _seed_of(request: Request) -> int | None:
    """The seed of a prepared request; None if its prompts have different ones."""
    seeds = {part.sampling.seed for part in request.parts or (request,)}
    return seeds.pop() if len(seeds) == 1 else None


def _check(request: Request) -> None:
    """Check everything that does not depend on the model. Raises INVALID_ARGUMENT."""
    if not request.parts:
        check_request(request)
        check_open(request)
        return
    check_count(request)
    for index, part in enumerate(request.parts):
        with _naming(index):
            check_request(part)
    check_open(request)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Add the index of the prompt to a failure's `param`."""
    try:
        yield
    except Failure as failure:
        if failure.param == "prompt":
            failure.param = f"prompt[{index}]"
        raise


def _check_characters(request: Request, model: Model) -> int:
    """Count the characters of the client's text. Raises PROMPT_TOO_LONG, without tokenising, if it cannot fit."""
    size = len(request.text or "") + sum(len(turn.name) + len(turn.content) for turn in request.messages or ())
    context = model.card.context_length
    if size > context * model.tokenizer.token_characters_max:
        name = "prompt" if request.messages is None else "messages"
        maximum = f"this model's maximum context length is {context} tokens"  # Stock clients look for these words.
        detail = f"{name} has {size} characters, which cannot fit: {maximum}"
        raise Failure(Reason.PROMPT_TOO_LONG, detail, param=name)
    return size
