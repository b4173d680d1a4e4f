"""What continuous batching may be given: every accepted combination is harmless to its loop, the rest is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.batching.sampling import GREEDY, Sampling, sampling_of
from penstock.schemas.errors import InvalidRequest

VOCABULARY = 512


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Sampling(temperature=1.0, top_k=VOCABULARY, top_p=1.0)),
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0, "seed": 7}, GREEDY),
        ({"temperature": 1e-9, "top_k": 40}, GREEDY),
        ({"temperature": 2, "top_k": 10_000}, Sampling(temperature=2.0, top_k=VOCABULARY, top_p=1.0)),
        ({"top_k": 0}, Sampling(temperature=1.0, top_k=VOCABULARY, top_p=1.0)),
        ({"temperature": 0.7, "top_p": 0.0}, Sampling(temperature=0.7, top_k=VOCABULARY, top_p=1e-6)),
        ({"temperature": None, "top_k": None, "top_p": None, "seed": None}, sampling_of({}, vocabulary=VOCABULARY)),
    ],
)
def test_accepted(params: dict[str, object], expected: Sampling) -> None:
    assert sampling_of(params, vocabulary=VOCABULARY) == expected


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1}, "payload.temperature"),
        ({"temperature": math.nan}, "payload.temperature"),
        ({"temperature": "hot"}, "payload.temperature"),
        ({"top_p": 1.5}, "payload.top_p"),
        ({"top_k": -1}, "payload.top_k"),
        ({"top_k": 1.5}, "payload.top_k"),
        ({"top_k": True}, "payload.top_k"),
    ],
)
def test_refused(params: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_of(params, vocabulary=VOCABULARY)
    assert caught.value.param == param


_VALUES = st.none() | st.integers(-5, 10**9) | st.floats() | st.booleans() | st.text(max_size=3)


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "seed"]), _VALUES))
def test_whatever_is_accepted_is_within_bounds(params: dict[str, object]) -> None:
    try:
        found = sampling_of(params, vocabulary=VOCABULARY)
    except InvalidRequest:
        return
    assert 0.01 <= found.temperature <= 100
    assert 1 <= found.top_k <= VOCABULARY
    assert 0 < found.top_p <= 1
