"""A filter by a value that no request can have is refused: it would never match."""

from __future__ import annotations

import pytest

from penstock.gateway.routes.request_filters import checked
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.schemas.errors import InvalidRequest


def test_possible_values_are_accepted() -> None:
    where = RequestFilter(status="running", task="embedding", klass="low", model="any", user_id="any")
    assert checked(where) is where
    assert checked(ALL) is ALL


@pytest.mark.parametrize(
    ("where", "param"),
    [
        (RequestFilter(status="done"), "status"),
        (RequestFilter(status="UNKNOWN"), "status"),
        (RequestFilter(task="embeding"), "task"),
        (RequestFilter(klass="urgent"), "class"),
    ],
)
def test_an_impossible_value_is_refused_by_name(where: RequestFilter, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(where)
    assert caught.value.param == param
