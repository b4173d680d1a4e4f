"""Texts that can be written, and texts for people: cut between words, with a sign that something was left out."""

from __future__ import annotations

import re


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a text, as one line that can be written; what is left out is marked by …"""
    words = " ".join(encodable(text).split())
    if len(words) <= limit:
        return words
    head = words[:limit]
    cut = head.rfind(" ")
    # A word that is longer than half of it all is cut: little else would be left.
    return (head[:cut] if cut > limit // 2 else head[: limit - 1]).rstrip(" ,;:.-(") + "…"


def encodable(text: str) -> str:
    """A text that UTF-8 can hold: halves of surrogate pairs are joined where both are there, else replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_DIRECTIONS = {point: f"\\u{point:04x}" for point in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def in_one_direction(text: str) -> str:
    """A sentence that quotes names: characters that turn the words behind them around are written as escapes."""
    return text if text.isascii() else text.translate(_DIRECTIONS)


_SECRET = re.compile(
    r"passw|passphrase|secret|ticket|token(?!s|\.endpoint)|api_?key|access_?key|account_?key|private[._]?key|sas_"
    r"|authorization|credential|cookie|[._]pem$|jaas|^ssl\.key\.|^sasl\.oauthbearer\.config"
)


def names_secret(name: str) -> bool:
    """Whether a value of this name is a secret; of librdkafka's properties at least those that it redacts."""
    return _SECRET.search(name.lower().replace("-", "_")) is not None


def without_user(text: str) -> str:
    """A URL as commands, logs and `/readyz` show it: with stars for a user name and password."""
    return re.sub(r"(\w://)[^/@\s]*@", r"\1***@", text)
