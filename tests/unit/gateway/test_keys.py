"""Keys: hashed at rest, found in constant time, followed when the file changes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.gateway_http import gateway_context
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.keys import KeyRing, KeysFileError, create_key, list_keys, revoke_key
from penstock.gateway.limits.limits import Limits
from penstock.schemas.errors import InvalidRequest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_no_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "mistyped" / "keys.json"
    for change in (lambda: create_key(path), lambda: revoke_key(path, "a")):
        with pytest.raises(KeysFileError, match=rf"the folder {path.parent} does not exist"):
            change()
    assert [*tmp_path.iterdir()] == []


def test_the_file_holds_rights_and_no_secret_and_only_its_owner_reads_it(path: Path) -> None:
    limits = Limits(outstanding=5, models=("a",))
    rights: dict[str, Any] = {"scopes": ["read"], "max_priority": 4, "rate": 2.5, "limits": limits}
    secret = create_key(path, tenant="acme", name="laptop", **rights)
    assert secret.split("_", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    (record,) = list_keys(path)
    assert KeyRing(path).find(secret) == record
    assert (record.tenant, record.name, record.limits) == ("acme", "laptop", limits)
    assert (record.scopes, record.max_priority, record.rate) == (("read",), 4, 2.5)
    assert record.digest not in repr(record)
    path.write_text(path.read_text().replace("outstanding", "outstandig"))
    with pytest.raises(KeysFileError, match="outstandig"):
        list_keys(path)


@pytest.mark.parametrize("wrong", ["", "pk", "pk_", "pk__", "pk_000000000000_x", "nonsense", "pk_é_\udcff", "x" * 5000])
def test_other_secrets_are_not_found(path: Path, wrong: str) -> None:
    secret = create_key(path)
    ring = KeyRing(path)
    assert ring.find(wrong) is None
    assert ring.find(secret + "x") is None
    assert ring.find(secret[:-1]) is None


def test_a_revoked_key_is_gone_at_the_next_look(path: Path) -> None:
    kept, lost = create_key(path), create_key(path)
    ring = KeyRing(path)
    record = ring.find(lost)
    assert record is not None
    assert revoke_key(path, record.key_id)
    assert not revoke_key(path, record.key_id)
    assert ring.find(lost) is None
    assert ring.record(record.key_id) is None
    assert ring.find(kept) is not None


def test_a_broken_file_keeps_the_last_good_keys_and_a_missing_one_keeps_none(path: Path) -> None:
    secret = create_key(path)
    ring = KeyRing(path)
    path.write_text("{ half")
    assert ring.find(secret) is not None
    path.unlink()
    assert ring.find(secret) is None
    again = create_key(path)
    assert ring.find(again) is not None


def test_a_change_is_in_force_although_nobody_called_before_the_file_broke(path: Path) -> None:
    secret = create_key(path)
    policy = AuthPolicy.build(keys_file=path)
    connections = gateway_context(policy=policy).connections
    revoke_key(path, list_keys(path)[0].key_id)
    connections.look()
    path.write_text("{ half")
    assert policy.keys is not None
    assert policy.keys.find(secret) is None


@pytest.mark.parametrize("content", ["", "[]", '{"keys": [{"id": "x"}]}', '{"keys": 3}'])
def test_a_file_that_is_something_else_is_refused_at_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeysFileError, match="not a keys file"):
        KeyRing(path)
    with pytest.raises(KeysFileError, match="penstock keys create"):
        KeyRing(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("rights", "error", "says"),
    [
        ({"tenant": "Not A Tenant"}, InvalidRequest, "tenant"),
        ({"scopes": ["root"]}, ValueError, "scopes"),
        ({"rate": 0}, ValueError, "rate"),
    ],
)
def test_bad_rights_are_refused_and_leave_no_file(path: Path, rights: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        create_key(path, **rights)
    assert not path.exists()


def test_writers_do_not_lose_each_others_keys(path: Path) -> None:
    with ThreadPoolExecutor(12) as threads:
        secrets = [*threads.map(lambda number: create_key(path, name=str(number)), range(12))]
    assert {record.name for record in list_keys(path)} == {str(number) for number in range(12)}
    assert len(set(secrets)) == 12
    assert json.loads(path.read_text())["version"] == 1


def test_a_file_that_cannot_be_looked_at_keeps_the_keys_and_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = create_key(path, tenant="acme")
    ring = KeyRing(path)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert ring.find(secret) is not None
    revoke_key(path, secret.split("_")[1])
    assert ring.find(secret) is None
