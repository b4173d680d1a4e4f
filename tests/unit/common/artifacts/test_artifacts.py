"""Artifacts on a local folder: ids, tenants, conversations, failures. A contract has what all stores do."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.artifacts import ArtifactStore, StorePlace, check_artifact_id
from penstock.common.artifacts.places import cause_of
from penstock.schemas.errors import InvalidRequest, NotFound, StoreUnavailable


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts", max_bytes=1000)


def test_bytes_without_facts_are_no_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    half = str(uuid.uuid4())
    (tmp_path / "artifacts" / "default" / half).mkdir(parents=True)
    (tmp_path / "artifacts" / "default" / half / "data").write_bytes(b"x")
    with pytest.raises(NotFound):
        store.get("default", half)


@pytest.mark.parametrize(
    "artifact_id", ["../other/x", "", "a/b", "..", "7E1C02B4-5F6A-4D2B-9C3E-8A1D0F4B6E57", "\0", "%2e%2e"]
)
def test_ids_that_are_no_uuid_are_refused(store: ArtifactStore, artifact_id: str) -> None:
    with pytest.raises(InvalidRequest):
        store.get("default", artifact_id)


@pytest.mark.parametrize("tenant", ["..", "a/b", "", "A", "."])
def test_tenants_that_would_leave_the_folder_are_refused(store: ArtifactStore, tenant: str) -> None:
    with pytest.raises(InvalidRequest):
        store.put(tenant, b"x")


@given(st.text())
def test_no_text_but_a_uuid_is_an_id(text: str) -> None:
    try:
        assert str(uuid.UUID(check_artifact_id(text))) == text
    except InvalidRequest:
        pass


def test_a_deleted_conversation_takes_its_artifacts_along(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    made, shared = (store.put("acme", b"made", conversation_id="trip") for _ in range(2))
    upload, elsewhere = store.put("acme", b"upload"), store.put("acme", b"made", conversation_id="other")
    for artifact in (made, shared, upload, elsewhere):
        store.holds.hold("acme", artifact.artifact_id, "trip")
    store.holds.hold("acme", shared.artifact_id, "other")
    store.conversation_gone("acme", "trip", store.holds.marks_of("acme", "trip"))
    assert store.peek("acme", made.artifact_id) is None
    assert all(store.peek("acme", one.artifact_id) for one in (shared, upload, elsewhere))
    assert store.holds.held_by("acme", "trip") == []
    assert store.holds.held_by("acme", "other") == [shared.artifact_id]


def test_a_conversation_releases_some_artifacts_and_holds_others(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    first, second = (store.put("acme", b"x") for _ in range(2))
    for artifact in (first, second):
        store.holds.hold("acme", artifact.artifact_id, "trip")
    for _ in range(2):
        store.holds.let_go("acme", "trip", [first.artifact_id])
    assert store.holds.held_by("acme", "trip") == [second.artifact_id]
    assert [store.holds.any_of("acme", one.artifact_id) for one in (first, second)] == [False, True]


# -- a store that fails


def test_a_failure_names_the_place_and_the_cause(store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    (folder / "default").write_text("a file where a tenant's folder should be")
    for ask in (lambda: store.put("default", b"x"), lambda: store.holds.hold("default", str(uuid.uuid4()), "c")):
        with pytest.raises(StoreUnavailable, match=r"Not a directory|File exists") as failed:
            ask()
        assert failed.value.message.startswith(f"the store of artifacts at {folder} failed: ")
        assert (failed.value.retryable, failed.value.http_status) == (True, 503)


def test_a_folder_that_cannot_be_made_is_a_store_that_fails(tmp_path: Path) -> None:
    """It can become available later: a disk is mounted, a file is moved away."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    words = f"the store of artifacts at {in_the_way} failed: File exists"
    with pytest.raises(StoreUnavailable, match=f"^{words}$"):
        ArtifactStore(in_the_way)
    store = ArtifactStore(tmp_path / "artifacts", stores={"cold": StorePlace(location=str(in_the_way), options={})})
    with pytest.raises(StoreUnavailable, match=words):
        store.put("default", b"picture", store="cold")
    in_the_way.unlink()
    assert store.put("default", b"picture", store="cold").store == "cold"


NO_SPACE = "Unable to copy data to file: No space left on device (os error 28)"
READ_ONLY = "Unable to create dir /data/t: Read-only file system (os error 30)"
LACKS = "The operation lacked the necessary privileges to complete for path"
FORBIDDEN = "Server returned non-2xx status code: 403 Forbidden"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (f"Generic LocalFileSystem error: {NO_SPACE}\n\nD", NO_SPACE),
        (f"Generic LocalFileSystem error: {READ_ONLY}\nDebug {{", READ_ONLY),
        (
            "Generic S3 error: Error performing PUT http://h/b?X-Amz-Signature=SECRET in 1s, after 1 retries, "
            "max_retries: 1, retry_timeout: 1s  - HTTP error: error sending request\n\nDebug source:\nGeneric {",
            "HTTP error: error sending request",
        ),
        (f"{LACKS} x: Error performing PUT http://h/b in 2ms  - {FORBIDDEN}: <AWSAccessKeyId>SECRET</", FORBIDDEN),
        (f"{LACKS} t/a: Error performing GET http://h:9000/b/t/a in 359.111µs - {FORBIDDEN}: <Error>", FORBIDDEN),
        (
            "Generic S3 error: Error performing list request: Error performing GET http://h/b?list-type=2&prefix=x in "
            "3.19s, after 10 retries, max_retries: 10, retry_timeout: 180s  - Server returned non-2xx status code: 500",
            "Server returned non-2xx status code: 500",
        ),
        ("Generic S3 error: cannot sign http://h/b?sig=SECRET&x=1 now", "cannot sign http://h/b now"),
        ("", "ValueError"),
    ],
)
def test_a_cause_is_one_line_without_secrets(said: str, cause: str) -> None:
    assert cause_of(ValueError(said)) == cause


@given(st.text())
def test_any_message_of_a_client_is_a_cause(said: str) -> None:
    cause = cause_of(ValueError(said))
    assert 0 < len(cause) <= 300
