"""llguidance's tokenizer and grammars, as an engine's process and the process that tries grammars both make them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

LIMITS = LLParserLimits(max_lexer_states=30_000, max_grammar_size=200_000, verbose_errors=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """What llguidance needs of a tokenizer. `described` is the JSON of the `tokenizers` library."""

    described: str
    vocabulary: int
    end_ids: Sequence[int]


def facts_of(tokenizer: Any, vocabulary: int, end_ids: Sequence[int]) -> TokenizerFacts | None:
    """None when the tokenizer is of a kind that has no description."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or not end_ids:
        return None
    described = json.loads(fast.to_str())
    described["padding"] = described["truncation"] = None
    # Converted from GGUF, a byte-level decoder is at the end of a sequence that does nothing; llguidance looks at
    # the sequence's beginning.
    steps = (described.get("decoder") or {}).get("decoders") or []
    described["decoder"] = next((step for step in steps if step["type"] == "ByteLevel"), described.get("decoder"))
    return TokenizerFacts(described=json.dumps(described), vocabulary=vocabulary, end_ids=list(end_ids))


def llguidance_tokenizer(facts: TokenizerFacts) -> LLTokenizer | None:
    """None when llguidance does not take it."""
    try:
        return LLTokenizer(facts.described, n_vocab=facts.vocabulary, eos_token=list(facts.end_ids))
    except Exception as error:
        logger.warning("grammar.tokenizer_refused error=%s", shortened(str(error), 300))
        return None


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The matcher at its start, which `get_error` may say is none. Can take for ever, and all memory."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is the slow one; copies have it
    return matcher
