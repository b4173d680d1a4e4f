"""Tokens to text as they come: the pieces concatenate to the whole, and none ends inside a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
PATIENCE = 8
"""How many tokens may pass without whole text (a character has at most four bytes); then the bytes are no text."""


class Detokeniser:
    """Feed it all tokens so far; it gives the text they add.

    Two offsets (as vLLM and TGI do): text is decoded from a prefix that was given out before, since a token's text can
    depend on the one before it (spaces), and the prefix's own text is cut off. `context_free` says that it cannot, as
    with byte-level vocabularies; then no prefix is decoded again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, context_free: bool = False) -> None:
        self._decode = decode
        self._context_free = context_free
        self._prefix = 0
        self._read = 0
        self._prefix_text = ""

    def feed(self, tokens: Sequence[int], *, final: bool = False) -> str:
        """New text of `tokens`, which begin with those of the last call; `final`: nothing follows."""
        if len(tokens) == self._read:
            return ""
        end = len(tokens)
        whole = self._decode(tokens[self._prefix :])
        if not final and _unfinished(whole, self._prefix_text):
            if end - self._read < PATIENCE:
                return ""
            end, whole = self._whole_part(tokens, whole)
        text = whole[len(self._prefix_text) :]
        self._prefix, self._read = self._read, end
        if self._context_free:
            self._prefix = self._read
        else:
            self._prefix_text = self._decode(tokens[self._prefix : self._read])
        return text

    def _whole_part(self, tokens: Sequence[int], whole: str) -> tuple[int, str]:
        """(end, text) up to the last whole character: only the last three tokens can be the start of another."""
        for end in range(len(tokens) - 1, len(tokens) - 4, -1):
            part = self._decode(tokens[self._prefix : end])
            if not _unfinished(part, self._prefix_text):
                return end, part
        return len(tokens), whole


def with_marker(tokenizer: Any, marker: str, decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """`decode`, which leaves special tokens out, but for the one that is a marker; as it is when there is no such."""
    marker_id: int | None = tokenizer.convert_tokens_to_ids(marker)
    if marker_id is None or tokenizer.convert_ids_to_tokens(marker_id) != marker:
        return decode
    if marker_id not in tokenizer.all_special_ids:
        return decode

    def decoded(ids: Sequence[int]) -> str:
        pieces: list[list[int]] = [[]]
        for token in ids:
            if token == marker_id:
                pieces.append([])
            else:
                pieces[-1].append(token)
        return marker.join(decode(piece) if piece else "" for piece in pieces)

    return decoded


def _unfinished(whole: str, prefix: str) -> bool:
    return len(whole) <= len(prefix) or whole.endswith(REPLACEMENT)
