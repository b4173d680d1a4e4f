"""What `penstock up --with` adds: the download is shown and confirmed, and each model is a valid entry."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kit.refusals import refused
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.hub_models import BUNDLES, agree, chosen
from penstock.cli.local_system import IMAGING, LocalSystem, Options
from penstock.cli.paths import free_port
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.processors.models.catalog import ModelConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_model_is_a_valid_entry_behind_the_defaults() -> None:
    for bundle in BUNDLES:
        for model in chosen([bundle, bundle]):
            entry = parse_entry(model.entry())
            config = ModelConfig.of(entry)
            assert set(config.tasks) <= set(config.kind.tasks)
            assert not entry.preload, "a chat must not wait for the download"
            assert entry.priority > ModelEntry.model_fields["priority"].default


def test_the_bundle_images_serves_the_tasks_that_the_defaults_lack() -> None:
    tasks = {task for model in chosen(["images"]) for task in model.tasks}
    assert {"image_generation", "image_editing", "image_to_text"} <= tasks


def test_an_unknown_bundle_is_refused() -> None:
    with refused(CliFailure, match=r"--with music: .*there are: images", exit_code=ExitCode.USAGE):
        chosen(["music"])


@pytest.mark.parametrize(
    ("answer", "yes", "refusal"),
    [
        ("y\n", False, None),
        ("n\n", False, "nothing was started"),
        ("\n", False, "nothing was started"),
        (None, False, "add --yes"),
        (None, True, None),
    ],
)
def test_downloads_are_shown_and_confirmed(
    answer: str | None, yes: bool, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer))
    if refusal is None:
        agree(chosen(["images"]), yes=yes, say=said.append)
    else:
        with pytest.raises(CliFailure, match=refusal) as caught:
            agree(chosen(["images"]), yes=yes, say=said.append)
        assert (caught.value.exit_code is ExitCode.USAGE) == (refusal == "add --yes")
    shown = [fact for model in chosen(["images"]) for fact in (model.source, model.fetches, model.licence)]
    assert all(fact in "\n".join(said) for fact in shown)
    agree([], yes=False, say=said.append)


def test_they_stand_in_for_the_image_model_and_their_names_must_be_free(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[models]]\nid = "painter"\nsource = "none"\nengine = "noop"\n')
    options = Options(
        data_dir=tmp_path, port=free_port(), kafka_port=free_port(), config=config, hub_models=chosen(["images"])
    )
    system = LocalSystem(options, print)
    assert [one["id"] for one in system.hub_entries()] == ["painter", "eyes"]
    assert IMAGING["id"] not in {"painter", "eyes"}
    with pytest.raises(CliFailure, match="painter is the name of another model"):
        system.start()
    assert not (tmp_path / "kafka").exists()
