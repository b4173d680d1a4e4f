"""Texts that can be written: halves of surrogate pairs are joined where both are there, and replaced where not."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.remote.wire import EncodableStream
from penstock.schemas.texts import encodable

ANY_CHARACTER = st.characters() | st.sampled_from(["\ud83d", "\ude00", "\ud800", "\udfff", "é", "🙂"])
ANY_TEXT = st.text(ANY_CHARACTER, max_size=12)


@given(ANY_TEXT)
def test_what_can_be_encoded_stays_as_it_is_and_the_rest_becomes_so(text: str) -> None:
    encodable(text).encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert encodable(text) == text


def test_pairs_and_halves() -> None:
    assert encodable("a\ud83d\ude00b") == "a\U0001f600b"
    assert encodable("a\ud83db\ude00") == "a\ufffdb\ufffd"


@given(st.lists(ANY_TEXT, max_size=6))
def test_pieces_give_what_the_whole_gives(pieces: list[str]) -> None:
    stream = EncodableStream()
    shown = [stream.feed(piece) for piece in pieces] + [stream.flush()]
    assert "".join(shown) == encodable("".join(pieces))
    for piece in shown:
        piece.encode()
