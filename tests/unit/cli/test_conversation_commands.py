"""What the commands about conversations refuse before they ask anybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.failures import CliFailure
from penstock.cli.main import app

NOWHERE = ["--url", "http://127.0.0.1:1"]
HEAD = {"object": "conversation.export", "version": 1, "id": "a", "log_id": "L", "messages": 0, "summaries": 0}


def refused(*words: str) -> CliFailure:
    result = CliRunner().invoke(app, ["conversations", *words, *NOWHERE])
    assert isinstance(result.exception, CliFailure | SystemExit), result.output
    return result.exception if isinstance(result.exception, CliFailure) else CliFailure(result.output)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay"], "name a conversation, or many by --pattern"),
        (["replay", "a", "--pattern", "*"], "name a conversation, or many by --pattern"),
        (["replay", "a", "--group", "g"], "--group is for --pattern"),
        (["replay", "a", "--rate", "2"], "--rate is for --pattern"),
        (["replay", "a", "--since", "1"], "--since is for --pattern"),
        (["replay", "a", "--follow"], "--follow is for --pattern"),
        (["sweep", "--within", "7d"], "--within is for --dry-run"),
        (["sweep", "--dry-run", "--within", "soon"], "no time to come, as 12h or 7d"),
        (["sweep", "--dry-run", "--within", "-1"], "no time to come, as 12h or 7d"),
        (["export"], "name conversations, or many by --pattern"),
        (["export", "a", "--pattern", "*"], "name conversations, or many by --pattern"),
        (["rerun", "a", "--model", "b", "--fork", "a"], "--fork must be another conversation"),
        (["rerun", "a", "--model", "b", "--after", "b"], "--after b: write the id of an item"),
        (["rerun", "a" * 120, "--model", "b" * 20], "name another by --fork"),
        (["compare", "a", "a"], "name two conversations"),
        (["export", "a", "--tree", "b"], "name conversations, or many by --pattern, or one for --tree"),
        (["export", "--pattern", "*", "--tree", "b"], "name conversations, or many by --pattern, or one for --tree"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    assert said in str(refused(*words))


def test_a_new_id_is_for_one_conversation(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps({**HEAD, "id": name}) + "\n" for name in "ab"))
    assert "holds 2 conversations: --id is for one" in str(refused("import", str(file), "--id", "c"))
    file.write_text(json.dumps(HEAD) + "\n")
    assert "--id is in place of --prefix" in str(refused("import", str(file), "--id", "c", "--prefix", "d"))


def test_a_file_that_is_not_whole_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_text(json.dumps({**HEAD, "messages": 2}) + "\n")
    assert "export it again" in str(refused("import", str(file)))
