"""Grammars compiled for a model's vocabulary by llguidance, kept for those who ask again. In an engine's process only.

Compiling has llguidance's own limits, and some grammars pass them all and are never done. So each is tried first in a
process that can be ended (`trials.py`). What a grammar costs at run time is limited too: one that needs too much for a
step fails its run alone.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from penstock.common.threads import in_daemon_thread
from penstock.processors.engines.guidance.compiling import compiled, facts_of, llguidance_tokenizer
from penstock.processors.engines.guidance.trials import COMPILE_CPU_S, TooComplex, Trials
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 * 2**20
BYTES_PER_CHARACTER = 40
"""Of a grammar's text, when compiled: measured with an enum of 50,000 values (17 MB of 440 kB)."""
LEAST_BYTES = 64 * 1024
REMEMBERED = 1024
"""Grammars that are too complex: one that is sent again is refused at once."""
PROBE = '{"a b": ["Ünï", -1.5e3, null]}\n'
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_REASONS = tuple(
    (re.compile(words), text)
    for words, text in (
        ("regexes .* not disjoint", "patterns of patternProperties overlap"),
        ("(?i)regex|lookaround", "a pattern that is none, or has look-around, back references or word boundaries"),
        ("Unsatisfiable", "no value fits it: look at minimum and maximum, enum, anyOf and allOf"),
        ("(?i)registry|pointer", "a $ref that leads to nothing within the schema"),
        ("(?i)format", "a format that is not known"),
        ("(?i)too (large|many|big|complex)|limit|large", "it is too large"),
        ("(?i)type", "a type that is none"),
    )
)
"""What llguidance says, and how callers hear it."""


class Grammars:
    """Matchers for grammars, by their text. Thread-safe."""

    def __init__(
        self, tokenizer: Any, *, vocabulary: int, end_ids: Sequence[int], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._source = tokenizer
        self._facts = facts_of(tokenizer, vocabulary, sorted(end_ids))
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._understood = False
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._too_complex: OrderedDict[int, None] = OrderedDict()
        self._trials: Trials | None = None
        self.bytes = 0
        """About what the compiled grammars hold."""

    async def ready(self, grammar: str, param: str) -> None:
        """Compile it, as far as that can be done: whatever it is, the event loop and other callers go on.

        `param` is the field that is named when the grammar will not do. Raises InvalidRequest, UnsupportedParameter,
        Overloaded when too many compile already, and EngineFailed.
        """
        with self._lock:
            if grammar in self._compiled:
                return
        await self.tried(grammar, param)
        await in_daemon_thread(self.matcher, grammar, param)

    async def tried(self, grammar: str, param: str) -> None:
        """Find out whether it compiles, and keep nothing of it. Raises as `ready`."""
        if (key := hash(grammar)) in self._too_complex:
            raise _too_complex(param)
        if self._facts is None or await in_daemon_thread(self._llguidance) is None:
            raise _unsupported(param)
        self._trials = self._trials or Trials(self._facts)
        try:
            error = await self._trials.run(grammar)
        except TooComplex:
            logger.warning("grammar.too_complex characters=%d", len(grammar))
            self._too_complex[key] = None
            if len(self._too_complex) > REMEMBERED:
                self._too_complex.popitem(last=False)
            raise _too_complex(param) from None
        if error is not None:
            raise _refusal(error, param)

    def was_too_complex(self, grammar: str) -> bool:
        """Whether its compilation was given up, which took seconds."""
        return hash(grammar) in self._too_complex

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """A matcher at its start, the caller's own, of a grammar that is `ready`. Raises as that."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar][0].deep_copy()
        tokenizer = self._llguidance()
        if tokenizer is None:
            raise _unsupported(param)
        made = compiled(tokenizer, grammar)
        if error := made.get_error():
            raise _refusal(error, param)
        with self._lock:
            self._keep(grammar, made)
        return made.deep_copy()

    def pids(self) -> set[int]:
        """The processes in which grammars are tried now."""
        return self._trials.pool.pids() if self._trials is not None else set()

    def close(self) -> None:
        """End the processes in which grammars are tried."""
        if self._trials is not None:
            self._trials.close()

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token that is text; None when they are not known."""
        tokenizer = self._llguidance()
        if tokenizer is None or not 0 <= token < tokenizer.vocab_size or tokenizer.is_special_token(token):
            return None
        return tokenizer.decode_bytes([token])

    def special_token(self, text: str) -> int | None:
        """The token that a text is, when no other text can be it; grammars must name such a token by its id."""
        tokenizer = self._llguidance()
        token = self._source.convert_tokens_to_ids(text)
        if tokenizer is None or token is None or self._source.convert_ids_to_tokens(token) != text:
            return None
        return int(token) if tokenizer.is_special_token(token) else None

    def _keep(self, grammar: str, compiled: LLMatcher) -> None:
        size = LEAST_BYTES + BYTES_PER_CHARACTER * len(grammar)
        if grammar in self._compiled or size > self._cache_bytes:
            return
        self._compiled[grammar] = (compiled, size)
        self.bytes += size
        while self.bytes > self._cache_bytes:
            self.bytes -= self._compiled.popitem(last=False)[1][1]

    def _llguidance(self) -> LLTokenizer | None:
        """The tokenizer as llguidance knows it, made when it is first needed; None when the two do not agree."""
        with self._lock:
            if self._tokenizer is None and self._facts is not None:
                self._tokenizer = llguidance_tokenizer(self._facts)
                self._understood = self._tokenizer is not None and _agree(self._tokenizer, self._source)
            return self._tokenizer if self._understood else None


def _agree(ours: LLTokenizer, theirs: Any) -> bool:
    ids = list(theirs(PROBE, add_special_tokens=False)["input_ids"])
    return ours.decode_bytes(ids).decode(errors="replace").strip() == PROBE.strip()


def _too_complex(param: str) -> InvalidRequest:
    message = f"{param} is too complex: it was not compiled within {COMPILE_CPU_S} s"
    return InvalidRequest(message, param=param)


def _unsupported(param: str) -> UnsupportedParameter:
    message = f"{param} is not supported by this model: its tokenizer or its end of text is of an unknown kind"
    return UnsupportedParameter(message, param=param)


def _refusal(error: str, param: str) -> InvalidRequest:
    """What llguidance found, in our words, with the keywords that it does not know by name."""
    unknown = _UNIMPLEMENTED.search(error)
    if unknown is None and "oneOf constraints" not in error:
        logger.debug("grammar.refused error=%s", shortened(error, 400))
        reason = next((text for words, text in _REASONS if words.search(error)), "it is not supported")
        return InvalidRequest(f"{param} cannot be enforced: {reason}", param=param)
    keywords = ["oneOf"] if unknown is None else sorted(re.findall(r'"([^"]*)"', unknown[1]))
    instead = ": use anyOf, or strict: false" if unknown is None else ""
    return InvalidRequest(
        shortened(f"{param} has keywords that cannot be enforced: {', '.join(keywords)}{instead}", 400),
        param=param,
        details={"keywords": keywords[:20]},
    )
