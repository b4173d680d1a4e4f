"""Streamed text: pieces concatenate to the whole and never end inside a character."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.text.detokenise import PATIENCE, Detokeniser


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level vocabulary without merges: a token is a byte; 256 and up are special and skipped."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A vocabulary whose decoder puts a space between words, as sentencepiece does."""
    return " ".join(f"w{token}" for token in tokens)


def stream(detokeniser: Detokeniser, tokens: Sequence[int], steps: Sequence[int]) -> list[str]:
    """Feed cumulative tokens, as many new ones at a time as `steps` says."""
    pieces: list[str] = []
    at = 0
    for step in steps:
        at = min(len(tokens), at + step)
        pieces.append(detokeniser.feed(tokens[:at], final=False))
    pieces.append(detokeniser.feed(tokens, final=True))
    return pieces


@given(st.text(max_size=40), st.lists(st.integers(1, 4), max_size=80), st.booleans())
def test_valid_text_comes_whole_and_in_whole_characters(text: str, steps: list[int], context_free: bool) -> None:
    pieces = stream(Detokeniser(decode_bytes, context_free=context_free), list(text.encode()), steps)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 300), max_size=60), st.booleans())
def test_bytes_that_are_no_text_neither_stop_the_stream_nor_raise(tokens: list[int], context_free: bool) -> None:
    detokeniser = Detokeniser(decode_bytes, context_free=context_free)
    pieces = stream(detokeniser, tokens, [1] * len(tokens))
    ascii_only = "".join(char for char in decode_bytes(tokens) if char < "\x80")
    assert "".join(char for char in "".join(pieces) if char < "\x80") == ascii_only


def test_endless_garbage_is_shown_after_a_while() -> None:
    detokeniser = Detokeniser(decode_bytes)
    tokens = [0xE2] * (PATIENCE * 3)
    assert any(detokeniser.feed(tokens[:count]) for count in range(1, len(tokens) + 1))


@given(st.lists(st.integers(0, 9), max_size=20))
def test_spaces_between_tokens_survive(tokens: list[int]) -> None:
    assert "".join(stream(Detokeniser(decode_words), tokens, [1] * len(tokens))) == decode_words(tokens)


def test_special_tokens_give_nothing() -> None:
    detokeniser = Detokeniser(decode_bytes, context_free=True)
    assert detokeniser.feed([104, 105]) == "hi"
    assert detokeniser.feed([104, 105, 256], final=True) == ""
