"""What `penstock up --with` adds: it is shown, agreed to, and forms entries that a worker takes."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.hub_models import BUNDLES, agree, chosen
from penstock.cli.local_system import IMAGING, LocalSystem, Options
from penstock.cli.paths import free_port
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.processors.models.catalog import ModelConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_model_is_an_entry_that_a_worker_takes() -> None:
    for bundle in BUNDLES:
        for model in chosen([bundle, bundle]):
            entry = parse_entry(model.entry())
            config = ModelConfig.of(entry)
            assert set(config.tasks) <= set(config.kind.tasks)
            assert not entry.preload, "nobody's chat waits for the download"
            assert entry.priority > ModelEntry.model_fields["priority"].default, "nor gets it for naming no model"


def test_images_do_all_that_the_defaults_cannot() -> None:
    tasks = {task for model in chosen(["images"]) for task in model.tasks}
    assert {"image_generation", "image_editing", "image_to_text"} <= tasks


def test_a_bundle_that_there_is_not() -> None:
    with pytest.raises(CliFailure, match=r"--with music: .*there are: images") as caught:
        chosen(["music"])
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(("answer", "agrees"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_the_person_is_asked(answer: str, agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    if agrees:
        agree(chosen(["images"]), yes=False, say=said.append)
    else:
        with pytest.raises(CliFailure, match="nothing was started"):
            agree(chosen(["images"]), yes=False, say=said.append)
    text = "\n".join(said)
    for model in chosen(["images"]):
        assert all(told in text for told in (model.source, model.fetches, model.licence))


def test_where_nobody_can_be_asked_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(CliFailure, match="add --yes") as caught:
        agree(chosen(["images"]), yes=False, say=lambda text: None)
    assert caught.value.exit_code is ExitCode.USAGE
    agree(chosen(["images"]), yes=True, say=lambda text: None)
    agree([], yes=False, say=lambda text: None)


def test_they_come_before_the_tiny_ones(tmp_path: Path) -> None:
    system = LocalSystem(Options(data_dir=tmp_path, hub_models=chosen(["images"])), print)
    assert [one["id"] for one in system._of_the_hub()] == ["painter", "eyes"]
    assert IMAGING["id"] not in {one["id"] for one in system._of_the_hub()}


def test_a_name_that_the_configuration_has_is_told_before_anything_is_started(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[models]]\nid = "painter"\nsource = "none"\nengine = "noop"\n')
    options = Options(
        data_dir=tmp_path, port=free_port(), kafka_port=free_port(), config=config, hub_models=chosen(["images"])
    )
    with pytest.raises(CliFailure, match="painter is the name of another model"):
        LocalSystem(options, print).start()
    assert not (tmp_path / "kafka").exists()
