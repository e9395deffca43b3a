"""A refusal for want of capacity says which bound it has met."""

import pytest

from services.errors import Failure, Reason
from services.refusals import RefusedFor, refused_for


@pytest.mark.parametrize("cause", RefusedFor)
def test_the_bound_comes_back_from_the_metadata(cause: RefusedFor) -> None:
    assert refused_for(Failure(Reason.OVERLOADED, "full", metadata={"cause": cause.value})) is cause


@pytest.mark.parametrize("metadata", [{}, {"cause": "from the future"}], ids=["none", "unknown"])
def test_where_none_is_known_it_is_capacity(metadata: dict[str, str]) -> None:
    assert refused_for(Failure(Reason.WORKER_AT_CAPACITY, "full", metadata=metadata)) is RefusedFor.CAPACITY
