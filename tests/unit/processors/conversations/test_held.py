"""Images that turns refer to, in a real store: what an erasure takes along, and what it leaves."""

from __future__ import annotations

from pathlib import Path

from penstock.common.artifacts import ArtifactStore
from penstock.processors.conversations.held import HeldImages


def test_an_erasure_takes_what_the_request_made_and_lets_go_of_the_rest(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    held = HeldImages(lambda: store)
    made, shared = (store.put("acme", b"made", request_id="r1", conversation_id="trip") for _ in range(2))
    upload, later = store.put("acme", b"upload"), store.put("acme", b"later", request_id="r2", conversation_id="trip")
    ids = [one.artifact_id for one in (made, shared, upload, later)]
    held.hold("acme", "trip", ids)
    store.holds.hold("acme", shared.artifact_id, "other")
    for _ in range(2):  # a worker that dies in between does it again
        held.keep_only("acme", "trip", {later.artifact_id}, "r1")
        assert store.peek("acme", made.artifact_id) is None
        assert store.holds.held_by("acme", "trip") == [later.artifact_id]
        assert store.holds.of("acme", shared.artifact_id) == ["other"]
        assert all(store.peek("acme", one.artifact_id) for one in (shared, upload, later))


def test_a_lost_answer_is_let_go(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    held = HeldImages(lambda: store)
    lost = store.put("acme", b"lost", request_id="r1", conversation_id="trip")
    held.hold("acme", "trip", [lost.artifact_id])
    held.let_go("acme", "trip", [lost.artifact_id])
    assert not store.holds.any_of("acme", lost.artifact_id)
    assert store.peek("acme", lost.artifact_id) is not None, "the sweeper takes it: its outcome does not name it"
