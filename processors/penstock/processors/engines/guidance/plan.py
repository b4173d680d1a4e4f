"""What a request wants of its answer beyond plain text: read from the request, compiled, and handed to its runs.

A `GuidancePlan` is made while the request is prepared; a plain request has none. In an engine's process only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import _get_template_variables  # pyright: ignore[reportPrivateUsage]

from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.batching.controls import Control, Logprob
from penstock.processors.engines.batching.logit_options import NONE, LogitOptions, logit_options_of
from penstock.processors.engines.guidance import dialects
from penstock.processors.engines.guidance.calls import CallReader
from penstock.processors.engines.guidance.control_strings import PARSED_OPTION, ControlStrings
from penstock.processors.engines.guidance.dialects import Dialect
from penstock.processors.engines.guidance.forms import SchemaPart, response_schema
from penstock.processors.engines.guidance.grammars import Grammars
from penstock.processors.engines.guidance.patterns import Patterns
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.finite_json import loads_finite, object_of

Json = dict[str, Any]


SET_HERE = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Variables of chat templates that no request sets."""
MOST_CALLS = 8
"""Calls that one forced answer may hold: small models do not know when it is enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools that a request offers, and whether a call is forced. `parallel`: more than one call may come."""

    tools: Sequence[Json]
    first: int = 0
    """The place of the first one in the request: of a tool that is chosen by name there is only that one."""
    forced: bool = False
    parallel: bool = True

    @property
    def strict(self) -> bool:
        """Whether a call that the model begins by itself must fit the schema of its tool."""
        return not self.forced and any(tool["function"].get("strict") is True for tool in self.tools)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_TOOLS = ToolUse(tools=())


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidancePlan:
    """`answers`: how many are made. `matcher` is at its start, and copied for each. `param` is blamed for it."""

    options: LogitOptions = NONE
    answers: int = 1
    matcher: Any = None
    param: str = "payload"
    use: ToolUse = NO_TOOLS
    dialect: Dialect = dialects.HERMES
    begun: Sequence[int] = field(default_factory=list[int])
    """Tokens that the answer begins with and the prompt ends with."""

    def control(self, index: int, prompt: Sequence[int], end_ids: Sequence[int]) -> Control | None:
        """For the run of one answer, which these tokens end; None when it needs none."""
        if self.options == NONE and self.matcher is None:
            return None
        matcher = None if self.matcher is None else self.matcher.deep_copy()
        # All answers have one prompt: its log probabilities are made with the first.
        options = self.options if index == 0 else replace(self.options, prompt_logprobs=None)
        control = Control(options, matcher=matcher, index=index, param=self.param)
        control.prompt, control.end_ids = frozenset(prompt) if control.repeats else frozenset(), end_ids
        return control

    def reader(self, answer_id: str) -> CallReader | None:
        """What reads calls out of one answer, and names them after it; None when there are no tools."""
        if not self.use.tools:
            return None
        return CallReader(
            self.dialect,
            self.use.names,
            answer_id,
            forced=self.use.forced,
            parallel=self.use.parallel,
            bare=self.dialect.bare or not self.use.strict,  # else the grammar would not have seen its beginning
        )


class Guidance:
    """Makes plans for one model. `slots`: how many answers the engine makes at once."""

    def __init__(
        self, tokenizer: Any, grammars: Grammars, *, vocabulary: int, slots: int, options: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._vocabulary = vocabulary
        self._slots = slots
        template = tokenizer.chat_template
        self._template: str | None = json.dumps(template) if isinstance(template, dict) else template
        self._variables = _variables(template)
        self._dialect = dialects.dialect_of(self._template, options.get("tool_parser"))
        self._strings = ControlStrings(tokenizer, self._template, parsed=bool(options.get(PARSED_OPTION, False)))
        self._passed_over = Patterns(grammars)

    async def ready(self, spec: RunSpec) -> None:
        """Compile the request's grammar, if it has one; seconds, in which others are not held up. Raises as `plan`."""
        use = _tool_use(spec)
        rule, param = self._grammar(spec, use)
        if rule is None:
            return
        try:
            await self._grammars.ready(rule, param)
        except InvalidRequest as error:
            if self._grammars.was_too_complex(rule):
                raise
            parts = _parts(spec.params, use)
            if error.details and "keywords" in error.details:  # which only strict schemas are refused for
                parts = [part for part in parts if part.strict]
            else:
                await self._passed_over.find(parts)
            for part in parts:  # one that still cannot be enforced is refused by its place
                await self._grammars.tried(f"start: {part.rule(self._passed_over)}", part.param)
            await self._grammars.ready(self._grammar(spec, use)[0] or rule, param)

    def plan(self, spec: RunSpec, *, greedy: bool) -> GuidancePlan | None:
        """None for a plain request. Its grammar is `ready`.

        Raises InvalidRequest, UnsupportedParameter, TooLarge, Overloaded.
        """
        answers = int(spec.params.get("n") or 1)
        if answers > self._slots:
            raise UnsupportedParameter(f"n can be at most {self._slots} here", param="payload.n")
        options = logit_options_of(spec.params, spec.extra, vocabulary=self._vocabulary, greedy=greedy)
        use = _tool_use(spec)
        rule, param = self._grammar(spec, use)
        if rule is None and options == NONE and answers == 1 and not use.tools:
            return None
        prefix = self._dialect.prefix if use.forced else ""
        return GuidancePlan(
            options=options,
            answers=answers,
            matcher=None if rule is None else self._grammars.matcher(rule, param),
            param=param,
            use=use,
            dialect=self._dialect,
            begun=list(self._tokenizer(prefix, add_special_tokens=False)["input_ids"]) if prefix else [],
        )

    def _grammar(self, spec: RunSpec, use: ToolUse) -> tuple[str | None, str]:
        """The grammar, or None when any text will do; and the field that is blamed for it."""
        shaped = (spec.params.get("response_format") or {}).get("type", "text") != "text"
        param = "payload.response_format" if shaped and not use.forced else "payload.tools"
        return self._rule(spec.params, use), param

    def _rule(self, params: Mapping[str, Any], use: ToolUse) -> str | None:
        """The grammar; None when any text will do."""
        if use.forced:
            return "\n".join(["start: calls", *self._call_rules(use)])
        asked = response_schema(params.get("response_format"))
        if asked is None:
            return self._strict_calls(use) if use.strict else None
        answer = asked.rule(self._passed_over)
        if not use.tools:
            return f"start: {answer}"
        rules = self._call_rules(use)
        prefix, suffix = (json.dumps(text) if text else "" for text in (self._dialect.prefix, self._dialect.suffix))
        return "\n".join(["start: answer | asked", f"asked: {prefix} calls {suffix}", f"answer: {answer}", *rules])

    def _call_rules(self, use: ToolUse) -> list[str]:
        """Lark rules for `calls`: one after another, each an object with a name and its arguments."""
        dialect, separator = self._dialect, json.dumps(self._dialect.separator)
        more = f" ({separator} call){{0,{MOST_CALLS - 1}}}" if use.parallel and dialect.separator else ""
        rules = ["call: " + " | ".join(f"tool_{number}" for number in range(len(use.tools))), f"calls: call{more}"]
        for number, (tool, part) in enumerate(zip(use.tools, _tool_parts(use), strict=True)):
            opening = json.dumps(f'{{"name": {json.dumps(tool["function"]["name"])}, "{dialect.arguments}": ')
            rules.append(f'tool_{number}: {opening} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: {part.rule(self._passed_over)}")
        return rules

    def _strict_calls(self, use: ToolUse) -> str:
        """Any text, but from where the model begins a call on nothing but a call of one of the tools."""
        dialect, rules = self._dialect, self._call_rules(use)
        if dialect.bare:
            # What begins as JSON is a call: there is nothing else that a call could be known by.
            return "\n".join(["start: calls | FREE |", r"FREE: /[ \n\t]*[^{\[ \n\t](.|\n)*/", *rules])
        special = self._grammars.special_token(dialect.marker)
        begun = "begun[lazy]: TEXT " + json.dumps(dialect.marker) if special is None else f"begun: TEXT <[{special}]>"
        opening, suffix = dialect.prefix.removeprefix(dialect.marker), dialect.suffix
        around = [json.dumps(text) if text else "" for text in (opening, suffix)]
        asked = f"asked: begun {around[0]} calls {around[1]}"
        return "\n".join(["start: asked* TEXT", asked, begun, r"TEXT: /(.|\n)*/", *rules])

    def render(self, messages: Sequence[Json], plan: GuidancePlan | None, variables: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat, as the model's template has it; `variables` are for the template.

        Raises what the template raises.
        """
        tools = [] if plan is None else [_for_template(tool) for tool in plan.use.tools]
        hidden = self._strings.hidden(messages)
        messages = messages if hidden is None else hidden
        if self._template is None:  # nothing reads variables
            plain = dialects.without_template(messages, tools)
            text = "".join(f"{message['role']}: {message['content']}\n" for message in plain) + "assistant:"
            if hidden is not None:
                return self._strings.encode(text, add_special_tokens=True)
            return list(self._tokenizer(text)["input_ids"])
        if dialects.knows_tools(self._template):
            chat, named = dialects.for_template(messages), {"tools": tools} if tools else {}
        else:
            chat, named = dialects.without_template(messages, tools), {}
        named = {**named, **{name: value for name, value in variables.items() if name in self._variables}}
        template = partial(self._tokenizer.apply_chat_template, chat, add_generation_prompt=True, **named)
        if hidden is not None:
            return self._strings.encode(template(tokenize=False))
        return list(template(tokenize=True, return_dict=True)["input_ids"])

    def logprobs(self, control: Control, begin: int, end: int) -> list[Json]:
        """The log probabilities of some tokens of a run, in the records' form. None of them is of an earlier run."""
        before = control.begun_with
        return list(map(self._told, control.logprobs[begin - before : end - before]))

    def prompt_logprobs(self, control: Control, prompt: Sequence[int]) -> list[Json]:
        """The log probabilities of a prompt, in the records' form. Its first token has none."""
        first = {**self._candidate(prompt[0], 0.0), "logprob": None}
        return [first, *map(self._told, map(control.prompt_logprobs.__getitem__, range(1, len(prompt))))]

    def _told(self, one: Logprob) -> Json:
        told = self._candidate(one.token, one.value)
        return {**told, "top_logprobs": [self._candidate(*pair) for pair in one.top]} if one.top else told

    def _candidate(self, token: int, value: float) -> Json:
        written = self._grammars.token_bytes(token)
        if written is None:
            text = self._tokenizer.decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}
        return {"token": written.decode(errors="replace"), "logprob": value, "bytes": list(written)}


def _variables(template: Any) -> frozenset[str]:
    """The variables of a chat template, or of several by name, that a request may set: not those that are set here."""
    texts: Any = template.values() if isinstance(template, dict) else (template,)
    return frozenset[str]().union(*map(_get_template_variables, texts)) - SET_HERE


def _tool_use(spec: RunSpec) -> ToolUse:
    """Raises InvalidRequest."""
    tools: Sequence[Json] = spec.params.get("tools") or ()
    choice = spec.params.get("tool_choice") or "auto"
    if tools and spec.messages is None:
        raise InvalidRequest("tools go with messages", param="payload.tools")
    if choice in ("none", "auto"):
        parallel = spec.extra.get("parallel_tool_calls") != "false"
        return NO_TOOLS if choice == "none" or not tools else ToolUse(tools=tools, parallel=parallel)
    if not tools:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="payload.tool_choice")
    if choice == "required":
        return ToolUse(tools=tools, forced=True, parallel=spec.extra.get("parallel_tool_calls") != "false")
    name = _named(choice)
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequest("tool_choice names a tool that is not among tools", param="payload.tool_choice")
    return ToolUse(tools=chosen[:1], first=tools.index(chosen[0]), forced=True, parallel=False)


def _named(choice: str) -> Any:
    try:
        return loads_finite(choice)["function"]["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}',
            param="payload.tool_choice",
        ) from error


def _parts(params: Mapping[str, Any], use: ToolUse) -> list[SchemaPart]:
    asked = None if use.forced else response_schema(params.get("response_format"))
    return [*_tool_parts(use), *([] if asked is None else [asked])]


def _tool_parts(use: ToolUse) -> list[SchemaPart]:
    places = (f"payload.tools[{number}].function.parameters" for number in range(use.first, use.first + len(use.tools)))
    functions = (tool["function"] for tool in use.tools)
    return [
        SchemaPart(_parameters(function, place), place, strict=function.get("strict") is True)
        for function, place in zip(functions, places, strict=True)
    ]


def _parameters(function: Json, param: str) -> Json:
    given = function.get("parameters")
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    found: Any = loads_finite(given) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return {"type": "object", **found}


def _for_template(tool: Json) -> Json:
    """A tool as templates show it: the schema of its arguments as an object."""
    function = {name: value for name, value in tool["function"].items() if value is not None and name != "strict"}
    if isinstance(function.get("parameters"), str):
        function["parameters"] = object_of(function["parameters"])
    return {"type": "function", "function": function}
