"""Grammars compiled for a model's vocabulary by llguidance, kept for those who ask again. In an engine's process only.

Compiling has llguidance's own limits and a time limit of ours; it runs in threads that the limit can leave behind,
so it must not run on the event loop. What a grammar costs at run time is limited too: one that needs too much for a
step fails its run alone.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.schemas.errors import InvalidRequest, Overloaded, UnsupportedParameter
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

COMPILE_S = 5.0
CACHE_BYTES = 64 * 2**20
BYTES_PER_CHARACTER = 40
"""Of a grammar's text, when compiled: measured with an enum of 50,000 values (17 MB of 440 kB)."""
LEAST_BYTES = 64 * 1024
MOST_COMPILING = 4
PROBE = '{"a b": ["Ünï", -1.5e3, null]}\n'
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


class Grammars:
    """Matchers for grammars, by their text. Thread-safe."""

    def __init__(
        self, tokenizer: Any, *, vocabulary: int, end_ids: Sequence[int], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(end_ids)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._understood = False
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._compiling = 0
        self.bytes = 0
        """About what the compiled grammars hold."""

    @property
    def limits(self) -> LLParserLimits:
        return LLParserLimits(max_lexer_states=30_000, max_grammar_size=200_000, verbose_errors=False)

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """A matcher at its start, the caller's own.

        `param` is the field that is named when the grammar will not do. Raises InvalidRequest, UnsupportedParameter,
        and Overloaded when too many compile already.
        """
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar][0].deep_copy()
        compiled = self._compile_in_time(grammar, param)
        if error := compiled.get_error():
            raise _refusal(error, param)
        with self._lock:
            self._keep(grammar, compiled)
        return compiled.deep_copy()

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

    def _compile_in_time(self, grammar: str, param: str) -> LLMatcher:
        with self._lock:
            if self._compiling >= MOST_COMPILING:
                raise Overloaded(f"{param}: too many grammars are being compiled", param=param, retry_after_s=1)
            self._compiling += 1
        done: Future[LLMatcher] = Future()

        def work() -> None:
            try:
                done.set_result(self._compile(grammar, param))
            except BaseException as error:  # the waiting thread raises it
                done.set_exception(error)
            finally:
                with self._lock:
                    self._compiling -= 1

        threading.Thread(target=work, name="compile", daemon=True).start()
        try:
            return done.result(COMPILE_S)
        except TimeoutError as error:
            logger.warning("grammar.too_slow characters=%d", len(grammar))
            raise InvalidRequest(
                f"{param} is too complex: it was not compiled within {COMPILE_S:g} s", param=param
            ) from error

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        tokenizer = self._llguidance()
        if tokenizer is None:
            raise UnsupportedParameter(
                f"{param} is not supported by this model: its tokenizer or its end of text is of an unknown kind",
                param=param,
            )
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=self.limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask is the slow one; copies have it
        return matcher

    def _llguidance(self) -> LLTokenizer | None:
        """The tokenizer as llguidance knows it, made when it is first needed; None when the two do not agree."""
        with self._lock:
            if self._tokenizer is None and self._end_ids:
                self._tokenizer = _llguidance_tokenizer(self._source, self._vocabulary, self._end_ids)
                self._understood = self._tokenizer is not None and _agree(self._tokenizer, self._source)
            return self._tokenizer if self._understood else None


def _llguidance_tokenizer(tokenizer: Any, vocabulary: int, end_ids: list[int]) -> LLTokenizer | None:
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None
    described = json.loads(fast.to_str())
    described["padding"] = described["truncation"] = None
    # Converted from GGUF, a byte-level decoder stands at the end of a sequence that does nothing; llguidance looks at
    # the sequence's beginning.
    steps = (described.get("decoder") or {}).get("decoders") or []
    described["decoder"] = next((step for step in steps if step["type"] == "ByteLevel"), described.get("decoder"))
    try:
        return LLTokenizer(json.dumps(described), n_vocab=vocabulary, eos_token=end_ids)
    except Exception as error:
        logger.warning("grammar.tokenizer_refused error=%s", shortened(str(error), 300))
        return None


def _agree(ours: LLTokenizer, theirs: Any) -> bool:
    ids = list(theirs(PROBE, add_special_tokens=False)["input_ids"])
    return ours.decode_bytes(ids).decode(errors="replace").strip() == PROBE.strip()


def _refusal(error: str, param: str) -> InvalidRequest:
    """What llguidance found, with the keywords that it does not know by name."""
    unknown = _UNIMPLEMENTED.search(error)
    if unknown is None:
        return InvalidRequest(shortened(f"{param} cannot be enforced: {error}", 400), param=param)
    keywords = sorted(re.findall(r'"([^"]*)"', unknown[1]))
    return InvalidRequest(
        shortened(f"{param} has keywords that cannot be enforced: {', '.join(keywords)}", 400),
        param=param,
        details={"keywords": keywords[:20]},
    )
