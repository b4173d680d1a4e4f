"""What engines were measured to take, over a restart of the worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.processors.core.fleet.estimates import EstimateKey
from penstock.processors.models import remembered
from penstock.processors.models.remembered import RememberedEstimates

KEY = EstimateKey("a/model@main", "cpu", "float32")
SHAPE = (64.0, 512.0)


async def test_what_was_measured_is_known_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "worker" / "memory.json"
    first = RememberedEstimates(file)
    await first.keep()
    assert not file.exists(), "nothing was learned"
    first.estimates.learn(KEY, SHAPE, 700, 1000)
    first.estimates.raise_after_oom(EstimateKey("other", "cuda", "bfloat16"), (), 500)
    await first.keep()
    again = RememberedEstimates(file)
    assert again.estimates.need(KEY, SHAPE, 1000) == first.estimates.need(KEY, SHAPE, 1000) < 1000
    assert again.estimates.need(EstimateKey("other", "cuda", "bfloat16"), (), 1) == 625
    assert [one.name for one in file.parent.iterdir()] == ["memory.json"], "no draft is left"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"version": 99, "learned": [1]}',
        b'{"version": 1, "learned": 3}',
        b"[" * 10**5,
    ],
)
async def test_what_cannot_be_read_counts_as_none_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "memory.json"
    file.write_bytes(content)
    kept = RememberedEstimates(file)
    assert kept.estimates.need(KEY, SHAPE, 1000) == 1200
    kept.estimates.learn(KEY, SHAPE, 700, 1000)
    await kept.keep()
    assert json.loads(file.read_text())["version"] == 1


async def test_one_bad_entry_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    kept = RememberedEstimates(file)
    kept.estimates.learn(KEY, SHAPE, 700, 1000)
    await kept.keep()
    document = json.loads(file.read_text())
    document["learned"] = [7, {"model": "x"}, {"model": "y", "kind": "", "dtype": "", "samples": [[[], "nan", 1]]}]
    document["learned"] += json.loads(file.read_text())["learned"]
    file.write_text(json.dumps(document))
    assert RememberedEstimates(file).estimates.measured(KEY) == 1


async def test_a_disk_that_is_full_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = RememberedEstimates(tmp_path / "memory.json")
    kept.estimates.learn(KEY, SHAPE, 700, 1000)
    (tmp_path / "memory.json").mkdir()
    await kept.keep()
    assert "estimates.unwritable" in caplog.text
    (tmp_path / "memory.json").rmdir()
    await kept.keep()
    assert RememberedEstimates(tmp_path / "memory.json").estimates.measured(KEY) == 1


def test_a_file_that_is_far_too_long_was_not_written_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "LONGEST_BYTES", 10)
    (tmp_path / "memory.json").write_text('{"version": 1, "learned": []}')
    assert RememberedEstimates(tmp_path / "memory.json").estimates.measured(KEY) == 0
