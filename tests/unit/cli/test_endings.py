"""Commands that read a list or a log while others write to it: they end at what stood there when they began."""

from __future__ import annotations

import json

import pytest

from kit.cli import Json, ScriptedGateway

REPLAY = "GET /v1/conversations/trip/replay"


def page(offsets: list[int], *, has_more: bool) -> Json:
    """Of a log that has grown to four records when its first page is read."""
    return {"data": [{"offset": one} for one in offsets], "has_more": has_more, "last_id": f"{offsets[-1]}@4"}


def test_a_replay_ends_where_the_log_ended_at_its_first_page(gateway: ScriptedGateway) -> None:
    """Its output, appended to the same conversation, kept it going for ever."""
    script: Json = {
        f"{REPLAY}?from_offset=1": page([1], has_more=True),
        f"{REPLAY}?from_offset=1&after=1%404": page([2, 3], has_more=False),
        REPLAY: (500, {"error": {"message": "this call follows the end of the log", "code": "internal_error"}}),
    }
    gateway.play(script)
    done = gateway.run("conversations", "replay", "trip", "--from-offset", "1")
    assert (done.exit_code, [json.loads(line)["offset"] for line in done.stdout.splitlines()]) == (0, [1, 2, 3])


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("conversations list", "/v1/conversations"),
        ("conversations show trip", "/v1/conversations/trip/items"),
        ("conversations forks trip", "/v1/conversations/trip/forks"),
        ("conversations export --pattern *", "/v1/conversations"),
        ("requests list", "/v1/requests"),
        ("artifacts list", "/v1/artifacts"),
        ("dlq list", "/v1/admin/dlq"),
    ],
)
def test_a_list_is_read_whole_before_its_first_line_is_written(
    gateway: ScriptedGateway, command: str, path: str
) -> None:
    """What reads the output can write to the list."""
    one = {"id": "one", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    refusal = {"error": {"message": "no second page", "code": "internal_error"}}
    gateway.play({f"GET {path}": [{"data": [one], "has_more": True, "last_id": "one"}, (500, refusal)]})
    done = gateway.run(*command.split(), *([] if "export" in command else ["--json"]))
    assert (done.exit_code, done.stdout, len(gateway.asked)) == (1, "", 2)
