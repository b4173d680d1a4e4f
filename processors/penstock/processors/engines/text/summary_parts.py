"""How a text is cut into parts that fit a model's window, and what the model is asked about them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.processors.earlier_messages import NO_EARLIER_MESSAGES
from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.context import SUMMARY_IS
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest

CHARS_PER_TOKEN = 3
"""English has four: a part that is denser is cut again."""
PROMPT_TOKENS = 80
"""What the question around a part takes, with the model's chat format."""
SUMMARY_TOKENS = 256
"""The longest summary when the request does not say."""
PART_ANSWER_TOKENS = 160
"""The longest summary of one part."""
UNKNOWN_WINDOW = 4096
"""Of a server that does not tell."""
LEAST_WINDOW = 512
"""A part takes no less, if the model's own window is not smaller."""
_ENDS = ("\n\n", "\n", ". ", " ")
"""Where a part may end, the best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """In tokens, `part_chars` in characters. `run_tokens`: the most that one run inside needs of the engine's cache."""

    part_tokens: int
    part_chars: int
    answer_tokens: int
    summary_tokens: int
    run_tokens: int
    together: int


def sizes_for(window: int | None, cache: int | None, wanted: int | None, together: int) -> Sizes:
    """Sizes for an engine with this window and, if tokens limit it, this cache. `wanted`: the summary's length.

    A part takes a quarter of the cache, and parts that run together half of it, so that others run meanwhile.
    Raises ContextLengthExceeded for a summary that is too long for the window.
    """
    window = window or UNKNOWN_WINDOW
    if cache is not None:
        window = min(window, max(LEAST_WINDOW, cache // 4, 3 * (wanted or 0)))
    summary = min(SUMMARY_TOKENS, window // 4) if wanted is None else wanted
    answer = max(1, min(PART_ANSWER_TOKENS, window // 8))
    question = min(PROMPT_TOKENS, window // 4)
    part = window - question - max(summary, answer)
    # Two answers must fit into a part: else putting summaries together would not come to an end.
    if part < 2 * answer + 2:
        raise ContextLengthExceeded(
            f"a summary of {summary} tokens leaves no room for the text in a window of {window}",
            param="payload.max_tokens",
            details={"need": summary, "capacity": window // 2, "unit": "tokens"},
        )
    parallel = 1 if cache is None else max(1, min(together, cache // 2 // window))
    return Sizes(
        part_tokens=part,
        part_chars=part * CHARS_PER_TOKEN,
        answer_tokens=answer,
        summary_tokens=summary,
        run_tokens=window if cache is None else min(cache, window + 64),
        together=parallel,
    )


def text_of(spec: RunSpec) -> str:
    """The text to sum up: the request's own, or that of its conversation. Raises InvalidRequest when there is none."""
    text = spec.payload.get("text")
    if text is None:
        past = spec.history or NO_EARLIER_MESSAGES
        before = [] if past.summary is None else [f"{SUMMARY_IS} {past.summary.text}"]
        text = "\n".join([*before, *(f"{message['role']}: {message['content']}" for message in past.messages)])
    if not text.strip():
        raise InvalidRequest("there is no text to sum up", param="payload")
    return text


def split(text: str, chars: int) -> list[str]:
    """Parts of at most so many characters that together are the text; they end at a paragraph, sentence or word."""
    parts: list[str] = []
    begin = 0
    while len(text) - begin > chars:
        end = _end(text, begin, chars)
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def _end(text: str, begin: int, chars: int) -> int:
    """The last good end in the second half of what fits behind `begin`; where there is none, what fits."""
    for mark in _ENDS:
        place = text.rfind(mark, begin + chars // 2, begin + chars - len(mark) + 1)
        if place >= 0:
            return place + len(mark)
    return begin + max(1, chars)


def packed(texts: Sequence[str], chars: int) -> list[list[str]]:
    """Neighbours put together as long as they fit; a group has at least two, so that there are always fewer groups."""
    groups: list[list[str]] = []
    size = 0
    for text in texts:
        if groups and (size + len(text) <= chars or len(groups[-1]) < 2):
            groups[-1].append(text)
            size += len(text) + 2
        else:
            groups.append([text])
            size = len(text)
    return groups


def whole_prompt(text: str) -> str:
    return f"Summarize the following text in a few sentences. Keep names, numbers and decisions.\n\n{text}"


def map_prompt(text: str, number: int, parts: int) -> str:
    return (
        f"This is part {number} of {parts} of a longer text. Summarize it in a few sentences. Keep names, numbers and"
        f" decisions.\n\n{text}"
    )


def reduce_prompt(summaries: str) -> str:
    return f"These are summaries of the parts of one text, in order. Write one summary of the whole.\n\n{summaries}"
