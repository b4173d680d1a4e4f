"""Grammars on a small tokenizer: what they allow, what is refused by name, how much is kept."""

import asyncio
import contextlib
import json
from typing import Any
from unittest.mock import create_autospec

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.batching.controls import Control
from penstock.processors.engines.batching.logit_options import LogitOptions
from penstock.processors.engines.guidance import patterns, trials
from penstock.processors.engines.guidance.dialects import DIALECTS
from penstock.processors.engines.guidance.forms import json_rule
from penstock.processors.engines.guidance.grammars import LEAST_BYTES, Grammars
from penstock.processors.engines.guidance.patterns import PATTERNS_TRIED
from penstock.processors.engines.guidance.plan import Guidance
from penstock.schemas.errors import InvalidRequest, Overloaded, UnsupportedParameter
from support import wait_until_async

END = 256
PARAM = "payload.response_format"


def tokenizer(decoder: Any = None) -> Any:
    """One token for each byte, and an end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoder or decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


TOKENIZER = tokenizer()


def grammars(**options: Any) -> Grammars:
    return Grammars(TOKENIZER, **{"vocabulary": 260, "end_ids": [END], **options})


def rule(schema: dict[str, Any], *, strict: bool = True) -> str:
    return f"start: {json_rule(schema, PARAM, strict=strict)}"


def accepts(matcher: Any, text: str) -> bool:
    ids = TOKENIZER(text)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_matcher_is_the_callers_own() -> None:
    made = grammars()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    first, second = (made.matcher(rule(schema), PARAM) for _ in range(2))
    assert accepts(first, '{"a": 1}')
    assert accepts(second, "{}")
    assert not accepts(made.matcher(rule(schema), PARAM), '{"a":1}')  # no free white space
    assert not accepts(made.matcher(rule(schema), PARAM), '{"b": 1}')


def test_a_byte_level_decoder_within_a_sequence_is_understood() -> None:
    """As tokenizers converted from GGUF have it (SmolLM2): llguidance alone takes its vocabulary for plain text."""
    sequence = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.ByteLevel()])
    made = Grammars(tokenizer(sequence), vocabulary=257, end_ids=[END])
    assert accepts(made.matcher(rule({"const": "ü b"}), PARAM), '"ü b"')
    assert made.token_bytes(TOKENIZER(" ")["input_ids"][0]) == b" "


@pytest.mark.parametrize(
    ("schema", "words", "keywords"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", ["uniqueItems"]),
        ({"not": {}, "dependentSchemas": {}}, "dependentSchemas, not", ["dependentSchemas", "not"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: use anyOf, or strict: false", ["oneOf"]),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-around", None),
        ({"type": "string", "pattern": "(" * 3000 + ")" * 3000}, "cannot be enforced", None),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no value fits", None),
        ({"$ref": "http://169.254.169.254/x"}, r"\$ref", None),
        ({"type": "string", "format": "nonsense"}, "format", None),
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(12)]} for i in range(6)]}, "large", None),
        *[
            ({"properties": properties, "patternProperties": patterns}, "cannot be enforced", None)
            for properties, patterns in (
                *[({}, other) for other in ([], ["^a$"], [5], 5, None)],
                *[(other, {"^a$": {}}) for other in ([], True, None)],
            )
        ],
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    schema: dict[str, Any], words: str, keywords: list[str] | None
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammars().matcher(rule(schema), PARAM)
    assert caught.value.param == PARAM
    assert (caught.value.details or {}).get("keywords") == keywords
    assert not any(word in caught.value.message for word in ("coerce_one_of", "x-guidance", "%json", "failed to"))


def test_what_is_not_strict_passes_over_unknown_keywords() -> None:
    lenient = rule({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, strict=False)
    assert accepts(grammars().matcher(lenient, PARAM), "[1, 1]")


def test_the_cache_is_bounded_by_bytes_and_forgets_the_oldest() -> None:
    made = grammars(cache_bytes=4 * LEAST_BYTES)
    for number in range(20):
        made.matcher(rule({"const": number}), PARAM)
        assert made.bytes <= 4 * LEAST_BYTES
    assert 1 <= len(made._compiled) <= 3
    assert rule({"const": 19}) in made._compiled
    made.matcher(rule({"enum": ["x" * 1000] * 50}), PARAM)  # larger than all: served, not kept
    assert made.bytes <= 4 * LEAST_BYTES


ENDLESS = [{"type": "integer", "multipleOf": number} for number in (9_999_991, 9_999_973, 9_999_971, 9_999_943)]
"""llguidance makes an automaton with a state for each remainder: minutes, within all limits of its own."""


async def test_grammars_that_are_never_compiled_are_refused_and_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "COMPILE_CPU_S", 1)
    monkeypatch.setattr(trials, "PROCESSES", 3)
    with contextlib.closing(grammars()) as made:
        refused = [asyncio.create_task(made.ready(rule(schema), PARAM)) for schema in ENDLESS[:2]]
        await asyncio.wait_for(made.ready(rule({"const": 1}), PARAM), 60)
        assert accepts(made.matcher(rule({"const": 1}), PARAM), "1")
        for task in refused:
            with pytest.raises(InvalidRequest, match="too complex") as caught:
                await asyncio.wait_for(task, 60)
            assert caught.value.param == PARAM
        tried = await pids_of(made, 1)
        for schema in ENDLESS[:2]:
            with pytest.raises(InvalidRequest, match="too complex"):
                await made.ready(rule(schema), PARAM)
        assert await pids_of(made, 1) == tried, "what is known to be too complex is not tried again"
    await pids_of(made, 0)


async def test_what_a_trial_finds_is_said_as_by_the_engine() -> None:
    with contextlib.closing(grammars()) as made:
        with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
            await made.ready(rule({"type": "array", "uniqueItems": True}), PARAM)
        assert caught.value.details == {"keywords": ["uniqueItems"]}
        await made.ready(rule({"type": "integer"}), PARAM)


async def test_too_many_that_wait_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PROCESSES", 1)
    monkeypatch.setattr(trials, "MOST_WAITING", 1)
    with contextlib.closing(grammars()) as made:
        tasks = [asyncio.create_task(made.ready(rule(schema), PARAM)) for schema in ENDLESS[:2]]
        while made._trials is None or made._trials._waiting < 1:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await made.ready(rule({"const": 2}), PARAM)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await made.ready(rule({"const": 2}), PARAM)
    await pids_of(made, 0)


async def pids_of(made: Grammars, count: int) -> set[int]:
    """The processes that try grammars, once there are so many of them."""
    await wait_until_async(lambda: len(made.pids()) == count, 30, lambda: f"{count} in place of {made.pids()}")
    return made.pids()


def test_a_model_without_an_end_or_with_an_unknown_tokenizer_refuses_by_name() -> None:
    for made in (grammars(end_ids=[]), Grammars(object(), vocabulary=9, end_ids=[1])):
        with pytest.raises(UnsupportedParameter, match="not supported by this model"):
            made.matcher(rule({}), PARAM)
        with pytest.raises(UnsupportedParameter, match="not supported by this model"):
            asyncio.run(made.ready(rule({}), PARAM))
        assert made.token_bytes(1) is None


def test_a_token_that_the_grammar_forbids_fails_the_run() -> None:
    control = Control(LogitOptions(), matcher=grammars().matcher(rule({"const": 1}), PARAM), param=PARAM)
    error = control.take(TOKENIZER("x")["input_ids"][0])
    assert isinstance(error, InvalidRequest)
    assert error.param == PARAM


def tool(name: str, parameters: dict[str, Any], strict: bool | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": json.dumps(parameters), "strict": strict}
    return {"type": "function", "function": function}


A_TO_99: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


def spec_of(**params: Any) -> RunSpec:
    return RunSpec(run_id="r", task="t", model="m", messages=[{"role": "user", "content": "x"}], params=params)


def guidance_of(made: Grammars, source: Any = TOKENIZER, parser: str = "json") -> Guidance:
    return Guidance(source, made, vocabulary=260, slots=4, options={"tool_parser": parser})


def strict_plan(parser: str, source: Any = TOKENIZER, **params: Any) -> Any:
    guidance = guidance_of(Grammars(source, vocabulary=260, end_ids=[END]), source, parser)
    return guidance.plan(spec_of(**{"tools": [tool("add", A_TO_99, True)], **params}), greedy=True)


@pytest.mark.parametrize("parser", DIALECTS)
def test_strict_tools_leave_text_free_and_hold_what_begins_as_a_call(parser: str) -> None:
    dialect, plan = DIALECTS[parser], strict_plan(parser)

    def said(arguments: str) -> str:
        call = f'{{"name": "add", "{dialect.arguments}": {arguments}}}'
        return dialect.prefix + call + dialect.suffix

    def allowed(text: str) -> bool:
        return accepts(plan.matcher.deep_copy(), text)

    assert allowed("")
    assert allowed("Hello <tool> [there]\n")
    assert allowed(said('{"a": 5}'))
    assert not allowed(said('{"a": "x"}'))
    assert not allowed(said('{"b": 5}'))
    reader = plan.reader("r")
    reader.feed(said('{"a": 5}'))
    assert reader.flush() == ""
    assert [call["function"]["arguments"] for call in reader.calls] == ['{"a": 5}']
    if dialect.marker and not dialect.bare:
        assert allowed("I add. " + said('{"a": 5}') + said('{"a": 6}') + " So.")
        assert not allowed("I add. " + said('{"a": "x"}'))
        assert allowed('{"name": "add", "arguments": {"a": "x"}}')  # which is text: the reader takes no bare call then
        assert plan.reader("r").feed('{"name": "add", ') != ""


def test_a_marker_that_is_a_special_token_begins_a_strict_call() -> None:
    source = tokenizer()
    source.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    plan = strict_plan("hermes", source)
    ids = source('so <tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>')["input_ids"]
    assert source.convert_tokens_to_ids("<tool_call>") in ids
    assert plan.matcher.deep_copy().try_consume_tokens(ids) == len(ids)
    bad = source('<tool_call>\n{"name": "add", "arguments": {"a": "x')["input_ids"]
    assert plan.matcher.deep_copy().try_consume_tokens(bad) < len(bad)


def test_tools_that_are_not_strict_cost_no_grammar() -> None:
    assert strict_plan("hermes", tools=[tool("add", A_TO_99)]).matcher is None
    assert strict_plan("hermes", tool_choice="none") is None


def with_pattern(pattern: str, **more: Any) -> dict[str, Any]:
    to = {"type": "string", "pattern": pattern, "maxLength": 4}
    return {"type": "object", "properties": {"to": to}, "required": ["to"], "additionalProperties": False, **more}


LOOKAROUND = with_pattern("^(?!x)[a-z]+$")
PLAIN = {"type": "object", "properties": {}, "additionalProperties": False}


async def planned(**params: Any) -> Any:
    with contextlib.closing(grammars()) as made:
        guidance = guidance_of(made)
        await guidance.ready(spec_of(**params))
        return guidance.plan(spec_of(**params), greedy=True)


def form(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json.dumps({"name": "s", "schema": schema, **more})}


@pytest.mark.parametrize(
    "pattern", ["^(?!x)[a-z]+$", r"(a)\1", r"\bx\b", "(?<=a)b", "["], ids=["ahead", "back", "word", "behind", "none"]
)
async def test_patterns_that_cannot_be_enforced_are_passed_over_where_nothing_is_strict(pattern: str) -> None:
    """And all else of the same schema holds, as the other tools do."""
    plan = await planned(tools=[tool("mail", with_pattern(pattern)), tool("w", PLAIN)], tool_choice="required")
    calls = {'{"name": "mail", "arguments": {"to": "abcd"}}': True, '{"name": "w", "arguments": {}}': True}
    calls |= {f'{{"name": "mail", "arguments": {one}}}': False for one in ('{"to": "abcde"}', "{}", '{"to": 5}')}
    assert {call: accepts(plan.matcher.deep_copy(), call) for call in calls} == calls
    shaped = await planned(response_format=form(with_pattern(pattern), strict=False))
    answers = {'{"to": "abcd"}': True, '{"to": "abcde"}': False, "{}": False, '{"to": "a", "b": 1}': False}
    assert {text: accepts(shaped.matcher.deep_copy(), text) for text in answers} == answers
    integer = {"a": {"type": "integer"}}  # and other names may fit the pattern
    bad_name = {
        "type": "object",
        "patternProperties": {pattern: {}},
        "properties": integer,
        "additionalProperties": False,
    }
    named = await planned(response_format=form(bad_name, strict=False))
    assert accepts(named.matcher.deep_copy(), '{"a": 1, "b": 2}')
    assert not accepts(named.matcher.deep_copy(), '{"a": "x"}')


TWO_TOOLS: Any = {"tools": [tool("w", PLAIN), tool("m", LOOKAROUND, True)]}
STRICT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    (TWO_TOOLS, "tools[1].function.parameters.properties.to.pattern"),
    (
        {**TWO_TOOLS, "tool_choice": '{"type":"function","function":{"name":"m"}}'},
        "tools[1].function.parameters.properties.to.pattern",
    ),
    (
        {"tools": [tool("w", LOOKAROUND), tool("m", {"properties": {"a": {"not": {}}}}, True)]},
        "tools[1].function.parameters",
    ),
    ({"response_format": form(LOOKAROUND)}, "response_format.json_schema.schema.properties.to.pattern"),
    (
        {"response_format": form({"patternProperties": {"(?=a)": {}}}, strict=True)},
        "response_format.json_schema.schema.patternProperties.(?=a)",
    ),
]


@pytest.mark.parametrize(("params", "param"), STRICT_REFUSALS, ids=range(len(STRICT_REFUSALS)))
async def test_what_is_strict_and_cannot_be_enforced_is_refused_by_its_place(
    params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await planned(**params)
    assert caught.value.param == f"payload.{param}"
    assert not any(word in caught.value.message for word in ("regex", "error", "%json", "RegexAst"))


@pytest.mark.parametrize(
    ("refused", "most"),
    [({"type": "integer", "minimum": 5, "maximum": 3}, PATTERNS_TRIED), ({"not": {}}, 0)],
    ids=["range", "keyword"],
)
async def test_a_refused_request_costs_few_trials_and_no_grammar_of_others(
    refused: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_autospec(trials.Trials.run, side_effect=trials.Trials.run)
    monkeypatch.setattr(trials.Trials, "run", run)
    tools = [tool(f"t{n}", {"properties": {f"{i}": {"pattern": f"{n}a{i}"} for i in range(30)}}) for n in range(3)]
    tools.append(tool("w", {"properties": {"a": refused}, "required": ["a"]}, True))
    with contextlib.closing(grammars()) as made:
        guidance = guidance_of(made)
        for _ in range(2):  # what is known of patterns is not tried again
            with pytest.raises(InvalidRequest) as caught:
                await guidance.ready(spec_of(tools=tools))
            assert caught.value.param == "payload.tools[3].function.parameters"
        tried = [call.args[1] for call in run.mock_calls]
        assert sum(grammar.startswith('start: %json {"type": "string"') for grammar in tried) == most
        assert not made._compiled


async def test_what_is_remembered_of_patterns_is_there_until_the_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "PATTERNS_KEPT", 3)
    asked = [spec_of(response_format=form({"pattern": f"(?={letter})"}, strict=False)) for letter in "abcd"]
    with contextlib.closing(grammars()) as made:
        guidance = guidance_of(made)
        for spec in (*asked[:3], asked[0], asked[3]):
            await guidance.ready(spec)
        assert guidance.plan(asked[0], greedy=True) is not None


@pytest.mark.parametrize("pattern", ["^score$", "^(score|b)$", "^(?:score)$"])
def test_patterns_that_are_names_are_properties(pattern: str) -> None:
    schema = {"type": "object", "properties": {"score": {"multipleOf": 5}}, "patternProperties": {pattern: INTEGER}}
    matcher = grammars().matcher(rule({**schema, "required": ["score"], "additionalProperties": False}), PARAM)
    assert accepts(matcher.deep_copy(), '{"score": 15}')
    for wrong in ('{"score": 7}', '{"score": "x"}', '{"c": 1}'):
        assert not accepts(matcher.deep_copy(), wrong)
    begun = TOKENIZER('{"score": 5,')["input_ids"]
    assert (matcher.try_consume_tokens(begun) == len(begun)) is ("b" in pattern)


INTEGER = {"type": "integer"}


def test_a_strict_tool_that_cannot_be_enforced_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        strict_plan("hermes", tools=[tool("add", {"properties": {"a": {"not": {}}}}, True)])
    assert (caught.value.param or "").startswith("payload.tools")
