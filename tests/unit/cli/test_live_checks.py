"""What doctor tries on what an installation depends on: it finds what is broken, and waits for nothing long."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from penstock.cli.checks import Check
from penstock.cli.live_checks import artifact_checks, artifacts_location, missing_queue_topics, within
from penstock.common.configuration import ArtifactsSection
from penstock.schemas.errors import BrokerUnavailable


def test_an_artifact_is_written_read_and_deleted(tmp_path: Path) -> None:
    (good,) = artifact_checks(ArtifactsSection(), str(tmp_path / "kept"))
    assert good.state == "ok"
    assert [path for path in (tmp_path / "kept").rglob("*") if path.is_file()] == [], "nothing stays behind"
    (tmp_path / "file").write_text("")
    (bad,) = artifact_checks(ArtifactsSection(), str(tmp_path / "file" / "kept"))
    assert (bad.state, str(tmp_path / "file") in bad.detail) == ("fail", True)
    assert bad.cure is not None


def test_where_artifacts_are(tmp_path: Path) -> None:
    assert artifacts_location(ArtifactsSection(location="s3://b/p"), tmp_path) == "s3://b/p"
    assert artifacts_location(ArtifactsSection(), tmp_path) == str(tmp_path / "artifacts")
    assert artifacts_location(ArtifactsSection(), None) is None


def test_a_probe_that_hangs_is_a_finding() -> None:
    let_go = threading.Event()

    def hangs() -> list[Check]:
        let_go.wait(30)
        return []

    began = time.monotonic()
    (found,) = within("artifacts", hangs, 0.05)
    assert time.monotonic() - began < 20
    assert (found.state, found.detail) == ("fail", "no answer within 0.05 s")
    let_go.set()
    assert within("queues", list, 5) == []

    def fails() -> list[Check]:
        raise BrokerUnavailable("it does not answer")

    (failed,) = within("queues", fails, 5)
    assert (failed.state, failed.detail) == ("fail", "it does not answer")


def test_a_missing_topic_of_a_queue_is_found() -> None:
    """It stops all queues, and one line of a log said so."""
    found = list(missing_queue_topics(["jobs", "results"], {"jobs"}))
    assert [(one.state, "results" in one.detail) for one in found] == [("fail", True)]
    assert [one.state for one in missing_queue_topics(["jobs"], {"jobs"})] == ["ok"]
