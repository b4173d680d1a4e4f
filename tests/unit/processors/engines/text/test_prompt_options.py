"""What requests ask of their prompt and its end: read from JSON texts, held within bounds."""

import pytest

from penstock.processors.engines.text.prompt_options import PromptOptions, prompt_options_of
from penstock.schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({}, PromptOptions()),
        ({"note": "{", "ignore_eos": "null", "truncate_prompt_tokens": "null"}, PromptOptions()),
        ({"ignore_eos": "true"}, PromptOptions(ignore_eos=True)),
        ({"truncate_prompt_tokens": "5"}, PromptOptions(last_tokens=5)),
        ({"truncate_prompt_tokens": "-1"}, PromptOptions(last_tokens=90)),
        ({"reasoning_effort": '"low"'}, PromptOptions(variables={"reasoning_effort": "low"})),
        (
            {"chat_template_kwargs": '{"a": 1, "reasoning_effort": "high"}', "reasoning_effort": '"low"'},
            PromptOptions(variables={"a": 1, "reasoning_effort": "high"}),
        ),
    ],
)
def test_read(extra: dict[str, str], wanted: PromptOptions) -> None:
    assert prompt_options_of(extra, room=90) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ignore_eos", "1"),
        ("ignore_eos", "yes"),
        ("truncate_prompt_tokens", "0"),
        ("truncate_prompt_tokens", "-2"),
        ("truncate_prompt_tokens", "true"),
        ("truncate_prompt_tokens", "1.5"),
        ("chat_template_kwargs", "[]"),
        ("chat_template_kwargs", '{"a": NaN}'),
        ("reasoning_effort", "5"),
    ],
)
def test_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_options_of({name: text}, room=90)
    assert caught.value.param == f"extra.{name}"


def test_the_last_tokens_are_read() -> None:
    assert PromptOptions(last_tokens=2).cut([1, 2, 3]) == [2, 3]
    assert PromptOptions(last_tokens=9).cut([1, 2, 3]) == [1, 2, 3]
    assert PromptOptions().cut([1, 2, 3]) == [1, 2, 3]
