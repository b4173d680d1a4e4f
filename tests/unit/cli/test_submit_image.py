"""`penstock submit image`: what is written on the command line, and where images are saved."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from penstock.cli.commands import image_files, submit, submit_image
from penstock.cli.commands.common import Gateway
from penstock.cli.failures import CliFailure, ExitCode

IMAGES = [{"url": f"/v1/artifacts/{number}/content", "media_type": "image/png"} for number in range(2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("strip_metadata", {"op": "strip_metadata"}),
        ("resize:width=640,fit=contain", {"op": "resize", "width": 640, "fit": "contain"}),
        ("rotate:degrees=12.5,expand=true", {"op": "rotate", "degrees": 12.5, "expand": True}),
        ("composite:image=logo.png,left=3", {"op": "composite", "image": "logo.png", "left": 3}),
    ],
)
def test_operations(text: str, expected: dict[str, Any]) -> None:
    assert submit_image.operation(text) == expected


@pytest.mark.parametrize("wrong", ["512", "x512", "512x", "axb"])
def test_a_size_that_is_none(wrong: str) -> None:
    with pytest.raises(CliFailure) as caught:
        submit_image.sides(wrong)
    assert caught.value.exit_code == ExitCode.USAGE
    assert submit_image.sides("512x256") == {"width": 512, "height": 256}


class _Served:
    """Gives the URL asked for as the bytes of an image."""

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Generator[Any]:
        yield SimpleNamespace(iter_bytes=lambda: iter([path.encode()[:9], path.encode()[9:]]))


def test_images_are_saved_in_a_folder_or_in_the_file_that_is_named(tmp_path: Path) -> None:
    gateway = cast("Gateway", _Served())
    saved = image_files.save_images(gateway, "0123456789", IMAGES, tmp_path / "new")
    assert [path.name for path in saved] == ["01234567-0.png", "01234567-1.png"]
    assert [path.read_bytes().decode() for path in saved] == [image["url"] for image in IMAGES]
    (one,) = image_files.save_images(gateway, "0123456789", IMAGES[:1], tmp_path / "dam.png")
    assert one == tmp_path / "dam.png"
    assert one.read_bytes().decode() == IMAGES[0]["url"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dam.png", "new"], "nothing half-written stays"


def test_a_prompt_is_still_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    def call(self: Gateway, method: str, path: str, *, body: Any = None, **options: Any) -> Any:
        bodies.append(body)
        return {"request_id": "r"}

    monkeypatch.setattr(Gateway, "call", call)
    for arguments in (["Paris?", "--no-wait"], ["--no-wait", "Paris?"], ["text", "Paris?", "--no-wait"]):
        result = CliRunner().invoke(submit.app, arguments)
        assert result.exit_code == 0, result.output
    assert [body["payload"]["messages"][0]["content"] for body in bodies] == ["Paris?"] * 3


def test_a_file_that_is_no_image_is_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"text")
    result = CliRunner().invoke(submit.app, ["image", "caption", str(file)])
    assert isinstance(result.exception, CliFailure)
    assert "is not an image of a known format" in str(result.exception)
