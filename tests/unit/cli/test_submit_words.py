"""What follows `penstock submit`: a command, a prompt, or a mistake; and what the commands for texts send."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.commands.common import Gateway
from penstock.cli.commands.submit_words import OTHER_NAMES, with_command
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.main import app
from penstock.schemas.tasks import TASKS

COMMANDS = ("text", "summarize", "embed", "caption", "image")


@pytest.mark.parametrize(
    "arguments",
    [["hello"], ["Paris?"], ["how are you", "--no-wait"], ["--no-wait", "x"], ["-"], ["-f", "-"], ["test"], [""]],
)
def test_a_prompt_goes_to_text(arguments: list[str]) -> None:
    assert with_command(arguments, COMMANDS) == ["text", *arguments]


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], ["embed", "x"], ["text", "sumarize"]])
def test_what_names_a_command_is_left_alone(arguments: list[str]) -> None:
    assert with_command(arguments, COMMANDS) == arguments


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["sumarize", "a text"],
            "submit summarize`? A prompt goes in quotes: `penstock submit text 'sumarize a text'`",
        ),
        (["summarise", "-"], "did you mean `penstock submit summarize`?"),
        (["Embeddings"], "did you mean `penstock submit embed`?"),
        (["image-generation", "--size", "9x9"], "did you mean `penstock submit image generate`?"),
        (["help"], "did you mean `penstock submit --help`?"),
        (["translate", "a text"], "it has caption, embed, image, summarize, text."),
        (["What", "is", "it?", "--stream"], "`penstock submit text 'What is it?'`"),
    ],
)
def test_a_word_that_was_meant_as_a_command_is_no_prompt(arguments: list[str], told: str) -> None:
    with pytest.raises(CliFailure) as caught:
        with_command(arguments, COMMANDS)
    assert caught.value.exit_code is ExitCode.USAGE
    assert told in str(caught.value)


def test_other_names_name_tasks_and_commands_that_are_there() -> None:
    assert {name for name in OTHER_NAMES if "_" in name} <= set(TASKS)
    for command in {*OTHER_NAMES.values()}:
        assert CliRunner().invoke(app, ["submit", *command.split(), "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "body"),
    [
        (
            ["-"],
            "a question\n",
            {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": "a question"}]}},
        ),
        (["summarize", "-"], "long\n\ntext\n", {"task": "summarization", "payload": {"text": "long\n\ntext"}}),
        (
            ["summarize", "-c", "trip", "--max-tokens", "9", "--model", "m"],
            "",
            {"task": "summarization", "model": "m", "payload": {"conversation_id": "trip", "max_tokens": 9}},
        ),
        (
            ["embed", "one", "-", "--priority", "8", "--dimensions", "3"],
            "two",
            {"task": "embedding", "priority": 8, "payload": {"input": ["one", "two"], "dimensions": 3}},
        ),
        (
            ["caption", "https://x.example/dam.png", "what?"],
            "",
            {"task": "image_to_text", "payload": {"image": {"url": "https://x.example/dam.png"}, "prompt": "what?"}},
        ),
    ],
)  # fmt: skip
def test_bodies(arguments: list[str], stdin: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Sent(Exception):
        """Nothing comes after the body."""

    def call(self: Gateway, method: str, path: str, *, body: Any = None, **options: Any) -> Any:
        sent.append(body)
        raise Sent

    monkeypatch.setattr(Gateway, "call", call)
    done = CliRunner().invoke(app, ["submit", *arguments], input=stdin)
    assert isinstance(done.exception, Sent), done.output
    assert sent == [body]


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        (["-"], b" \n", "stdin, and that is empty"),
        (["summarize", "-"], b"\xff\xfe", "stdin, and that is none"),
        (["summarize"], b"", "one of them"),
        (["summarize", "a", "-c", "trip"], b"", "one of them"),
        (["embed", "-", "-"], b"x", "give - once"),
    ],
)
def test_what_is_no_text_is_wrong_usage(arguments: list[str], stdin: bytes, told: str) -> None:
    done = CliRunner().invoke(app, ["submit", *arguments], input=stdin)
    assert (done.exit_code, told in done.stderr) == (2, True), done.output
