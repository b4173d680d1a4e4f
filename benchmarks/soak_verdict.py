"""The verdict on a soak: what a reader of the result topic sees by the product's own fold, and what the store holds."""

from __future__ import annotations

import io
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from soak_requests import Expected

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweep import plan
from penstock.common.artifacts.sweeping import Sweeper
from penstock.gateway.view.outputs import artifact_ids_of
from penstock.schemas.errors import PenstockError
from penstock.schemas.fold import Ignored, ResultFold
from penstock.schemas.records import ResultEvent

_SWEPT_AFTER_S = 2 * 3600
"""A sweep spares what is younger than an hour."""
_SHOWN = 10


@dataclass
class Judge:
    """Takes the events of the result topic as they come, and holds them against what was expected."""

    expected: Mapping[str, Expected]
    folds: dict[str, ResultFold] = field(default_factory=dict[str, ResultFold])
    ends: Counter[str] = field(default_factory=Counter[str])
    faults: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By what is wrong: the requests of which it is."""

    def take(self, events: Iterable[ResultEvent]) -> None:
        for event in events:
            fold = self.folds.get(event.request_id)
            if fold is None:
                fold = self.folds[event.request_id] = ResultFold(event.request_id, event.tenant)
            step = fold.apply(event)
            self.ends[event.request_id] += event.is_terminal
            if not isinstance(step, Ignored) and not self.expected[event.request_id].text.startswith(fold.text):
                self.faults["seams"].add(event.request_id)

    def outcomes(self) -> dict[str, ResultEvent]:
        return {name: fold.terminal for name, fold in self.folds.items() if fold.terminal is not None}

    def look_at_outcomes(self, store: ArtifactStore) -> None:
        """Fill `faults` with requests that are lost, did not complete, or have a wrong output."""
        outcomes = self.outcomes()
        self.faults["lost"] |= self.expected.keys() - outcomes.keys()
        for name, event in outcomes.items():
            expected = self.expected[name]
            if event.status == "expired" and expected.ttl_ms is not None:
                if event.created_at < event.origin.append_time_ms + expected.ttl_ms:
                    self.faults["expired too early"].add(name)
            elif event.status != "completed":
                self.faults["not completed"].add(f"{name} {event.status} {event.error}")
            elif wrong := _wrong(event, expected, store):
                self.faults["wrong output"].add(f"{name} {wrong}")

    def sweep(self, store: ArtifactStore, others: Iterable[str]) -> Counter[str]:
        """Have the product's sweeper take away what no outcome names. Returns how many artifacts, by its reasons.

        Whatever is left after that, and is named by no outcome and is none of `others`, is a fault.
        """
        sweeper = Sweeper(store, lambda: time.time() + _SWEPT_AFTER_S)
        listing, facts = sweeper.look()
        named = {(event.tenant, event.request_id): artifact_ids_of(event) for event in self.outcomes().values()}
        swept = sweeper.apply(plan(listing, facts, sweeper.now_ms(), named=named))
        left, _ = sweeper.look()
        known = {*others, *(one for ids in named.values() for one in ids)}
        self.faults["left behind"] |= {one for _, one in (*left.facts, *left.data)} - known
        return Counter(one.reason for one in swept)

    def longest_waits(self) -> dict[str, tuple[float, str, int]]:
        """By kind of request: the longest, in seconds from its append to its outcome, whose it was, and how many others
        of the kind waited at least half as long: what holds up a kind holds up many."""
        waits: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, event in self.outcomes().items():
            wait_s = (event.created_at - event.origin.append_time_ms) / 1000
            waits[self.expected[name].kind].append((wait_s, name))
        return {
            kind: (*max(of_kind), sum(wait_s >= max(of_kind)[0] / 2 for wait_s, _ in of_kind) - 1)
            for kind, of_kind in waits.items()
        }

    def figures(self) -> dict[str, Any]:
        outcomes = self.outcomes().values()
        return {
            "requests": len(self.expected),
            "kinds": Counter(one.kind for one in self.expected.values()),
            "outcomes": Counter(str(event.status) for event in outcomes),
            "artifacts": sum(len(artifact_ids_of(event)) for event in outcomes),
            "ended more than once in the log": sum(count > 1 for count in self.ends.values()),
            "restarted streams": sum(fold.restarts > 0 for fold in self.folds.values()),
            "longest wait in s": self.longest_waits(),
            "faults": {what: [len(names), *sorted(names)[:_SHOWN]] for what, names in self.faults.items() if names},
        }


def _wrong(event: ResultEvent, expected: Expected, store: ArtifactStore) -> str | None:
    """What is wrong with a completed request's output; its artifacts are read and compared with their digests."""
    try:
        if expected.colour is not None:
            return _wrong_image(event, expected, store)
        text = event.output_text
        if event.output_artifact is not None:
            kept = store.get(event.tenant, event.output_artifact.artifact_id, sha256=event.output_artifact.sha256)
            text = json.loads(kept)["text"]
    except PenstockError as error:
        return f"cannot be read: {error}"
    return None if text == expected.text else f"another text, of {len(text or '')} characters"


def _wrong_image(event: ResultEvent, expected: Expected, store: ArtifactStore) -> str | None:
    (named,) = (event.output or {})["images"]
    image = Image.open(io.BytesIO(store.get(event.tenant, named["artifact_id"], sha256=named["sha256"])))
    found = image.size, image.convert("RGB").getpixel((3, 3))
    return None if found == (expected.size, expected.colour) else f"another image: {found}"
