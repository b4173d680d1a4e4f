"""What a request asks of its prompt and its end in the words of other servers. The fields travel in `extra`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.processors.engines.batching.logit_options import MAX_TOKENS, passed_number, passed_on
from penstock.schemas.errors import InvalidRequest

WHOLE_WINDOW = -1
"""As `truncate_prompt_tokens`: the prompt may fill what the answer leaves of the window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """`last_tokens`: only so many tokens of the prompt are read, its last ones. `variables`: for the chat template."""

    ignore_eos: bool = False
    last_tokens: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def cut(self, ids: list[int]) -> list[int]:
        return ids if self.last_tokens is None else ids[-self.last_tokens :]


def prompt_options_of(extra: Mapping[str, str], *, room: int) -> PromptOptions:
    """`room`: how many tokens the prompt may have. Raises InvalidRequest."""
    if not extra:
        return PromptOptions()
    ignore_eos = passed_on(extra, "ignore_eos")
    if not isinstance(ignore_eos, bool | None):
        raise InvalidRequest("extra.ignore_eos must be true or false", param="extra.ignore_eos")
    name = "truncate_prompt_tokens"
    last = passed_number(extra, name, WHOLE_WINDOW, MAX_TOKENS, whole=True)
    if last == 0:
        raise InvalidRequest(f"extra.{name} must be -1, or at least 1", param=f"extra.{name}")
    return PromptOptions(
        ignore_eos=bool(ignore_eos),
        last_tokens=None if last is None else max(1, room) if last == WHOLE_WINDOW else int(last),
        variables=_variables(extra),
    )


def _variables(extra: Mapping[str, str]) -> dict[str, Any]:
    """`reasoning_effort` is a variable of those templates that know it."""
    given, effort = passed_on(extra, "chat_template_kwargs"), passed_on(extra, "reasoning_effort")
    if not isinstance(given, dict | None):
        raise InvalidRequest("extra.chat_template_kwargs must be an object", param="extra.chat_template_kwargs")
    if not isinstance(effort, str | None):
        raise InvalidRequest("extra.reasoning_effort must be text", param="extra.reasoning_effort")
    return {**({} if effort is None else {"reasoning_effort": effort}), **cast("dict[str, Any]", given or {})}
