"""The images of deploy/Dockerfile, built by buildah on a base made by debootstrap, and containers of them.

A container is run by unshare and chroot with what the image says of user, environment and entry point: its root is
read-only, its process has the pid 1, and it writes to the volume and to /tmp alone. It shares the network of this
machine, and there are neither control groups nor a filter of system calls: a runtime such as runc needs more rights
than a build machine gives. What is built is kept in the cache, so that a second build takes a part of the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from penstock.cli.paths import cache_dir, exclusive
from stock_clients import missing, tool

ROOT = Path(__file__).parents[3]
BASE = "penstock-base"
PACKAGES = "python3,python3-venv,ca-certificates"
SETTINGS = ("deploy/Dockerfile", "pyproject.toml", "constraints.txt")
"""What the layers of packages are made of."""
RUN = """
mount -o remount,bind,ro "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp"
mount --bind "$2" "$1/data"
exec chroot --userspec="$3" "$1" env -i --chdir="$4" HOME="$4" "${@:5}"
"""


class Container:
    """A process of an image; `data` is its volume."""

    def __init__(self, image: Image, data: Path, words: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        config = image.config
        environment = [*config["Env"], *(f"{name}={value}" for name, value in env.items())]
        command = [*environment, *words]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "bash", "-ec"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*unshare, RUN, "run", str(image.root), str(data), config["User"], config["WorkingDir"], *command],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """To the process with the pid 1."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(number)


class Image:
    """`root`: where its files lie, as a container sees them."""

    def __init__(self, images: Images, target: str) -> None:
        tag = f"penstock:{target}"
        images.build(target, tag)
        about = json.loads(images.buildah("inspect", "--type", "image", tag))
        self.config: dict[str, Any] = about["Docker"]["config"]
        made = images.buildah("from", tag).strip()
        self.root = Path(images.buildah("mount", made).strip())

    def start(self, *words: str, data: Path, env: dict[str, str], log: Path) -> Container:
        """`words` with their program, as the entry point is."""
        return Container(self, data, list(words), env, log)

    def run(self, *words: str, data: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The same to the end."""
        log = data.with_name(f"{data.name}.out")
        log.unlink(missing_ok=True)
        container = self.start(*words, data=data, env=env or {}, log=log)
        return subprocess.CompletedProcess(words, container.process.wait(120), container.text())


class Images:
    """Their storage, in a folder for each state of SETTINGS; older ones are removed."""

    def __init__(self, folder: Path) -> None:
        for name in ("buildah", "debootstrap", "unshare"):
            tool(name)
        digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in SETTINGS)).hexdigest()[:12]
        self._place = folder / digest
        self._folder = folder
        for place in folder.glob("????????????"):
            self.close(place)  # containers of a run that was killed are mounted
            if place != self._place:
                shutil.rmtree(place)
        self._mounted = folder / "mounted"
        self._mounted.mkdir(parents=True, exist_ok=True)
        (self._mounted / "uv.toml").write_text("system-certs = true\n")
        if BASE not in self.buildah("images", "--format", "{{.Name}}"):
            self._make_base()

    def _storage(self, place: Path) -> list[str]:
        return ["--root", str(place / "root"), "--runroot", str(place / "run")]

    def buildah(self, *words: str, place: Path | None = None) -> str:
        storage = self._storage(place or self._place)
        done = subprocess.run(["buildah", *storage, *words], capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def _make_base(self) -> None:
        """As python:3.11-slim: Debian with Python and the certificates of authorities."""
        packed = self._folder / "base.tar"
        if not packed.exists():
            with TemporaryDirectory(dir=self._folder) as made:
                run = f"debootstrap --variant=minbase --include={PACKAGES} bookworm {made}"
                subprocess.run(run.split(), check=True, capture_output=True)
                pack = f"tar -C {made} --exclude ./var/cache/apt/* --exclude ./var/lib/apt/lists/* -cf {packed}.part ."
                subprocess.run(pack.split(), check=True)
            Path(f"{packed}.part").rename(packed)
        container = self.buildah("from", "scratch").strip()
        self.buildah("add", "--quiet", container, str(packed), "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)

    def build(self, target: str, tag: str) -> None:
        words = f"--layers --format docker --target {target}"
        file = ["--file", str(ROOT / "deploy/Dockerfile"), "--tag", tag, str(ROOT)]
        self.buildah("bud", *words.split(), *self.options, *file)

    @property
    def options(self) -> list[str]:
        """This machine's certificates and pip's settings are mounted while it is built; the image has none of them."""
        mounts = {"/etc/ssl/certs": "/etc/ssl/certs", "/etc/pip.conf": "/etc/pip.conf", self._mounted: "/etc/uv"}
        volumes = [f"--volume={source}:{target}:ro" for source, target in mounts.items() if Path(source).exists()]
        return ["--isolation", "chroot", "--build-arg", f"BASE=localhost/{BASE}", *volumes]

    def release(self, target: str, version: str) -> dict[str, str]:
        """Build as deploy/release.py does; the image's labels."""
        storage = shlex.join(self._storage(self._place))
        options = {"BUILDAH_STORAGE": storage, "BUILDAH_OPTIONS": shlex.join(self.options)}
        env = {**os.environ, **options, "BUILDAH_ISOLATION": "chroot"}
        code = f"import release; release.DIST.mkdir(exist_ok=True); release.build_image({target!r}, {version!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "deploy", env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        about = json.loads(self.buildah("inspect", "--type", "image", f"penstock:{version}-{target}"))
        return about["Docker"]["config"]["Labels"]

    def close(self, place: Path | None = None) -> None:
        self.buildah("rm", "--all", place=place)


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    if os.getuid() != 0:
        missing("only root can build images and run containers here")
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"):
        made = Images(folder)
        yield made
        made.close()


@pytest.fixture(scope="module")
def slim(images: Images) -> Image:
    return Image(images, "slim")


@pytest.fixture(scope="module")
def worker(images: Images) -> Image:
    return Image(images, "worker")


@pytest.fixture
def data(slim: Image, tmp_path: Path) -> Path:
    """A volume that is the user's, as a new one of the image is."""
    made = tmp_path / "data"
    shutil.copytree(slim.root / "data", made)
    owner = (slim.root / "data").stat()
    os.chown(made, owner.st_uid, owner.st_gid)
    return made
