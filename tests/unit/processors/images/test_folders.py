"""Images that are files of the worker's machine: what lies below an allowed folder is read, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kit.refusals import refused
from penstock.processors.images.folders import ImageFolders
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge

PARAM = "payload.image.url"


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A folder of images beside a secret, with links of all kinds."""
    inside = tmp_path / "in"
    (inside / "sub").mkdir(parents=True)
    (tmp_path / "in-too").mkdir()
    for path in (inside / "photo.png", inside / "a b.png", tmp_path / "secret.png", tmp_path / "in-too" / "x.png"):
        path.write_bytes(path.name.encode())
    (inside / "large.png").write_bytes(bytes(101))
    (inside / "near.png").symlink_to("photo.png")
    (inside / "out.png").symlink_to(tmp_path / "secret.png")
    (inside / "out").symlink_to(tmp_path)
    (inside / "loop.png").symlink_to("loop.png")
    os.mkfifo(inside / "pipe.png")
    return inside


def read(inside: Path, url: str) -> bytes:
    return ImageFolders({"/data/in": inside}, max_bytes=100).read(url, param=PARAM)


@pytest.mark.parametrize(
    ("url", "content"),
    [
        ("file:///data/in/photo.png", b"photo.png"),
        ("FILE://localhost/data/in//photo.png", b"photo.png"),
        ("file:///data/in/a%20b.png", b"a b.png"),
        ("file:///data/in/near.png", b"photo.png"),
    ],
)
def test_a_file_below_the_folder_is_read(inside: Path, url: str, content: bytes) -> None:
    assert read(inside, url) == content


OUTSIDE = "lies in no folder that images may come from"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/data/in/../secret.png", OUTSIDE),
        ("/data/in/%2e%2e/secret.png", OUTSIDE),
        ("/data/in/sub/../../secret.png", OUTSIDE),
        ("/data/in/out.png", OUTSIDE),
        ("/data/in/out/secret.png", OUTSIDE),
        ("/data/in/out/nothing.png", OUTSIDE),
        ("/data/in-too/x.png", OUTSIDE),
        ("/data/in", OUTSIDE),
        ("/etc/passwd", OUTSIDE),
        ("/data/in/photo.png%00.png", "is not the path of a file"),
        ("/data/in/photo.png?a=b", "is not the path of a file"),
        ("/data/in/none.png", "there is no such file"),
        ("/data/in/photo.png/x", "there is no such file"),
        ("/data/in/loop.png", "there is no such file"),
        ("/data/in/" + "x" * 300, "there is no such file"),
        ("/data/in/sub", "is not a file"),
        ("/data/in/pipe.png", "is not a file"),
        ("/data/in/large.png", "has more than 100 bytes"),
    ],
)
def test_all_else_is_refused_with_its_reason(inside: Path, path: str, words: str) -> None:
    with refused((InvalidRequest, TooLarge), words, param=PARAM):
        read(inside, f"file://{path}")


def test_a_link_that_is_exchanged_after_it_was_looked_at_is_not_followed(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)  # what realpath saw then were no links
    with pytest.raises(PenstockError, match="no such file"):
        read(inside, "file:///data/in/out/secret.png")


def test_without_folders_no_file_is_read() -> None:
    with pytest.raises(InvalidRequest, match=r"images\.folders is empty"):
        ImageFolders({}, max_bytes=1).read("file:///data/in/photo.png", param=PARAM)


def test_folders_are_a_list_or_a_table() -> None:
    assert ImagesSection.model_validate({"folders": ["/data/in"]}).folders == {"/data/in": Path("/data/in")}
    assert ImagesSection.model_validate({"folders": {"/data/in": "/srv"}}).folders == {"/data/in": Path("/srv")}


def test_the_innermost_folder_holds_a_path(inside: Path) -> None:
    folders = ImageFolders({"/data": inside, "/data/sub": inside.parent / "in-too"}, max_bytes=100)
    assert folders.read("file:///data/sub/x.png", param=PARAM) == b"x.png"


@pytest.mark.parametrize(
    "folders", [["data"], ["/"], ["/data/../etc"], {"/in": "/"}, {"/in": "photos"}, {"/in": "/a/../.."}, {"in": "/a"}]
)
def test_a_folder_is_an_absolute_path_below_the_root(folders: list[str] | dict[str, str]) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        ImagesSection.model_validate({"folders": folders})
