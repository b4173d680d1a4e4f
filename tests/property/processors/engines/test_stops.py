"""Stop strings: whatever the sizes of the pieces, what is shown is the text before the earliest complete stop."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from penstock.processors.engines.stops import StopMatcher

STOPS = st.lists(st.text("ab\n", max_size=4), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first end of a stop string decides, of several there the longest is cut."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=examples(400))
@given(pieces=st.lists(st.text("ab\nc", max_size=6), max_size=10), stops=STOPS)
def test_as_if_searched_in_the_whole(pieces: list[str], stops: list[str]) -> None:
    expected, stopped = naive("".join(pieces), stops)
    matcher = StopMatcher(stops)
    shown = ""
    longest = max(map(len, stops), default=0)
    for number, piece in enumerate(pieces):
        shown += matcher.feed(piece)
        assert expected.startswith(shown)
        if not matcher.stopped:
            assert len("".join(pieces[: number + 1])) - len(shown) < max(1, longest), "more is held back than needed"
    assert matcher.stopped == stopped
    assert shown + matcher.flush() == expected
    assert matcher.flush() == ""
    if stopped:
        assert matcher.feed("more") == ""
