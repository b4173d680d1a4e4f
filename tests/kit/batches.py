"""Batches of a real system, by the stock OpenAI client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import openai

from support import wait_until
from system import Process

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Batches:
    """What a user of the stock client does with batches at one gateway."""

    client: openai.OpenAI

    @classmethod
    def at(cls, gateway: Process, key: str = "none") -> Batches:
        return cls(openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=60))

    def upload(self, lines: list[Any]) -> str:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        return self.client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id

    def begin(self, lines: list[Any], endpoint: Any = CHAT, **options: Any) -> str:
        made = self.client.batches.create(
            input_file_id=self.upload(lines), endpoint=endpoint, completion_window="24h", **options
        )
        assert made.status == "validating"
        return made.id

    def get(self, batch_id: str) -> Any:
        return self.client.batches.retrieve(batch_id)

    def wait(self, batch_id: str, deadline_s: float = 120, *, status: tuple[str, ...] = ENDED) -> Any:
        wait_until(lambda: self.get(batch_id).status in status, deadline_s, lambda: repr(self.get(batch_id)), 0.1)
        return self.get(batch_id)

    def wait_count(self, batch_id: str, least: int, deadline_s: float = 60) -> None:
        """Until so many lines are known to have ended."""

        def ended() -> bool:
            counts = self.get(batch_id).request_counts
            return counts.completed + counts.failed >= least

        wait_until(ended, deadline_s, lambda: repr(self.get(batch_id)), 0.05)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = body or {"model": "noop", "messages": [{"role": "user", "content": f"line {number}"}]}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
