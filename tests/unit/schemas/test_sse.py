"""Lines of server-sent events, whatever pieces they come in."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.sse import SseLines


@given(st.text(alphabet="a\r\n\u2028\u0085\x0b\x1c", max_size=20).map(str.encode), st.lists(st.integers(0, 60)))
def test_lines_are_the_same_in_pieces_of_any_size(text: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    splitter = SseLines()
    lines = [line for begin, end in itertools.pairwise(bounds) for line in splitter.feed(text[begin:end])]
    assert [*lines, splitter.rest()] == re.split(rb"\r\n|\n|\r", text)
