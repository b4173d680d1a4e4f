"""`penstock submit`: a command, a prompt or a mistake; the bodies that are sent; where images are saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.cli import Json, ScriptedGateway, invoke
from kit.refusals import refused
from penstock.cli.commands import submit_image
from penstock.cli.commands.common import Gateway
from penstock.cli.commands.submit import OTHER_NAMES, with_command
from penstock.cli.commands.submitting import Sent
from penstock.cli.failures import CliFailure, ExitCode
from penstock.schemas.tasks import TASKS

COMMANDS = ("text", "summarize", "embed", "caption", "image")


PROMPTS = [["hello"], ["Paris?"], ["how are you", "--no-wait"], ["--no-wait", "x"], ["-"], ["-f", "-"], ["test"], [""]]
NAMED = [[], ["-h"], ["--help"], ["embed", "x"], ["text", "sumarize"]]


@pytest.mark.parametrize("arguments", [*PROMPTS, *NAMED])
def test_a_prompt_goes_to_text_and_the_name_of_a_command_is_left_alone(arguments: list[str]) -> None:
    assert with_command(arguments, COMMANDS) == (arguments if arguments in NAMED else ["text", *arguments])


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("sumarize TEXT", "submit summarize`? A prompt goes in quotes: `penstock submit text 'sumarize TEXT'`"),
        ("summarise -", "did you mean `penstock submit summarize`?"),
        ("Embeddings", "did you mean `penstock submit embed`?"),
        ("image-generation --size 9x9", "did you mean `penstock submit image generate`?"),
        ("help", "did you mean `penstock submit --help`?"),
        ("translate TEXT", "it has caption, embed, image, summarize, text."),
        ("What is it? --stream", "`penstock submit text 'What is it?'`"),
    ],
)
def test_a_mistyped_command_is_no_prompt(arguments: str, advice: str) -> None:
    with pytest.raises(CliFailure) as caught:
        with_command(arguments.split(), COMMANDS)
    assert caught.value.exit_code is ExitCode.USAGE
    assert advice in str(caught.value)


def test_other_names_name_existing_tasks_and_commands() -> None:
    assert {name for name in OTHER_NAMES if "_" in name} <= set(TASKS)
    for command in {*OTHER_NAMES.values()}:
        assert invoke("submit", *command.split(), "--help").exit_code == 0


def text(prompt: str) -> Json:
    return {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": prompt}]}}


PICTURE = "https://x.example/dam.png"


@pytest.mark.parametrize(
    ("arguments", "stdin", "body"),
    [
        ("Paris? --no-wait", "", text("Paris?")),
        ("--no-wait Paris?", "", text("Paris?")),
        (
            "Paris? --no-wait --start-after 2027-01-15T09:00:00Z",
            "",
            {**text("Paris?"), "start_after": "2027-01-15T09:00:00Z"},
        ),
        ("text Paris? --no-wait", "", text("Paris?")),
        ("- --no-wait", "a question\n", text("a question")),
        ("summarize - --no-wait", "long\n\ntext", {"task": "summarization", "payload": {"text": "long\n\ntext"}}),
        (
            "summarize -c trip --max-tokens 9 --model m --no-wait", "",
            {"task": "summarization", "model": "m", "payload": {"conversation_id": "trip", "max_tokens": 9}},
        ),
        (
            "embed one - --priority 8 --dimensions 3 --no-wait", "two",
            {"task": "embedding", "priority": 8, "payload": {"input": ["one", "two"], "dimensions": 3}},
        ),
        (
            f"caption {PICTURE} what?", "",
            {"task": "image_to_text", "payload": {"image": {"url": PICTURE}, "prompt": "what?"}},
        ),
    ],
)  # fmt: skip
def test_bodies(gateway: ScriptedGateway, arguments: str, stdin: str, body: Json) -> None:
    ended = {"status": "completed", "done": True, "result": {"text": "A dam."}}
    follow: Json = {"GET /v1/requests/r/events": (204, None), "GET /v1/requests/r": ended}
    gateway.play({"POST /v1/requests": (202, {"request_id": "r", "status": "accepted"}), **follow})
    done = gateway.run("submit", *arguments.split(), stdin=stdin)
    assert (done.exit_code, [sent for sent in gateway.bodies if sent]) == (0, [body]), done.output


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["-"], b" \n", "the text, which - reads from stdin, is empty"),
        (["summarize", "-"], b"\xff\xfe", "stdin, and that is none"),
        (["summarize"], b"", "one of them"),
        (["summarize", "a", "-c", "trip"], b"", "one of them"),
        (["embed", "-", "-"], b"x", "give - once"),
        # It was answered with text that the model made up.
        *(([command, " "], b"", "penstock: the text is empty\n") for command in ("text", "summarize", "embed")),
    ],
)
def test_a_missing_or_empty_text_is_wrong_usage(
    gateway: ScriptedGateway, arguments: list[str], stdin: bytes, said: str
) -> None:
    done = gateway.run("submit", *arguments, stdin=stdin)
    assert (done.exit_code, said in done.stderr, gateway.asked) == (2, True, []), done.output


def test_a_file_that_is_no_image_is_not_sent(gateway: ScriptedGateway, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"text")
    done = gateway.run("submit", "image", "caption", str(file))
    assert "is not an image of a known format" in done.stderr
    assert gateway.asked == []


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("strip_metadata", {"op": "strip_metadata"}),
        ("resize:width=640,fit=contain", {"op": "resize", "width": 640, "fit": "contain"}),
        ("rotate:degrees=12.5,expand=true", {"op": "rotate", "degrees": 12.5, "expand": True}),
        ("composite:image=logo.png,left=3", {"op": "composite", "image": "logo.png", "left": 3}),
    ],
)
def test_image_operations(operation: str, expected: Json) -> None:
    assert submit_image.operation(operation) == expected


@pytest.mark.parametrize("wrong", ["512", "x512", "512x", "axb"])
def test_image_sizes(wrong: str) -> None:
    with refused(CliFailure, exit_code=ExitCode.USAGE):
        submit_image.sides(wrong)
    assert submit_image.sides("512x256") == {"width": 512, "height": 256}


def test_images_are_saved_in_a_folder_or_in_the_named_file(gateway: ScriptedGateway, tmp_path: Path) -> None:
    images = [{"url": f"/v1/artifacts/{number}/content", "media_type": "image/png"} for number in range(2)]
    content = {image["url"]: image["url"] * 20_000 for image in images}  # more than one piece
    gateway.play({f"GET {url}": text for url, text in content.items()})
    client = Gateway(url=gateway.url)
    saved = submit_image.save_images(client, "0123456789", images, tmp_path / "new")
    assert [path.name for path in saved] == ["01234567-0.png", "01234567-1.png"]
    assert [json.loads(path.read_text()) for path in saved] == [*content.values()]
    (one,) = submit_image.save_images(client, "0123456789", images[:1], tmp_path / "dam.png")
    assert (one, one.read_bytes()) == (tmp_path / "dam.png", saved[0].read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dam.png", "new"], "no partial file remains"


def test_a_start_may_be_a_length_of_time_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert Sent(start_after="10m").body("text_generation", {})["start_after"] == 1_000_600.0
    assert Sent(start_after="1000600").body("text_generation", {})["start_after"] == "1000600"
    with pytest.raises(CliFailure, match="is no length of time"):
        Sent(start_after="ten minutes").body("text_generation", {})
