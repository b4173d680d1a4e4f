"""Builds a release into dist/: wheel, sdist, images, bills of materials, checksums. `make release VERSION=1.0.0`.

It sets the version in pyproject.toml and in the chart, unless it fails, and changes nothing else. It pushes and tags
nothing: the last lines say what is left to do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
CHART = "deploy/helm/penstock/Chart.yaml"
PLACES = {"pyproject.toml": r'(?m)^version = "(.*)"$', CHART: r'(?m)^appVersion: "(.*)"$'}
"""By file: what matches its line with the version. Everything else reads that of the installed package."""
IMAGES = ("slim", "worker")
BILL_TRIES = 3


class Refused(Exception):
    """The release cannot be made; the text says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--no-images", action="store_true", help="build the packages alone")
    options = parser.parse_args()
    try:
        release(options.version, images=not options.no_images)
    except (Refused, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def release(version: str, *, images: bool) -> None:
    check(version, (ROOT / "CHANGELOG.md").read_text(), run("git", "status", "--porcelain"))
    before = {name: (ROOT / name).read_text() for name in PLACES}
    try:
        for name, line in PLACES.items():
            (ROOT / name).write_text(with_version(before[name], line, version))
        build(version, images=images)
    except BaseException:
        for name, text in before.items():
            (ROOT / name).write_text(text)
        raise
    print(next_steps(version, images=images))


def build(version: str, *, images: bool) -> None:
    """Fill dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    run(sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(DIST), str(ROOT))
    (DIST / ".gitignore").unlink(missing_ok=True)
    shutil.copy(ROOT / "constraints.txt", DIST / f"penstock-{version}-constraints.txt")
    try_wheel(version)
    for target in IMAGES if images else ():
        build_image(target, version)
    write_checksums()


def check(version: str, changelog: str, changes: str) -> None:
    """Raises Refused unless the version can be released from a tree with these changes (`git status --porcelain`)."""
    if not VERSION.fullmatch(version):
        raise Refused(f"{version!r} is no version: write it as 1.0.0 or 1.0.0rc1")
    if changes:
        raise Refused(f"the tree has changes; commit them, or take them back:\n{changes.rstrip()}")
    if not re.search(rf"(?m)^## {re.escape(version)}\b", changelog):
        raise Refused(f"CHANGELOG.md has no heading `## {version}`: give `## Unreleased` that name")


def with_version(text: str, line: str, version: str) -> str:
    """The file's text with this version in the one line that matches."""
    found = list(re.finditer(line, text))
    if len(found) != 1:
        raise Refused(f"{len(found)} lines match {line}, not one")
    start, end = found[0].span(1)
    return text[:start] + version + text[end:]


def try_wheel(version: str) -> None:
    """Install it with the pinned versions into an empty environment, ask for its version, and write its bill."""
    (wheel,) = DIST.glob("*.whl")
    with TemporaryDirectory() as folder:
        python = Path(folder) / "v/bin/python"
        run(sys.executable, "-m", "uv", "venv", "--quiet", str(python.parents[1]), cwd=folder)
        install = [
            "-m",
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "-c",
            str(ROOT / "constraints.txt"),
        ]
        run(sys.executable, *install, str(wheel), cwd=folder)
        told = run(str(python.with_name("penstock")), "--version", cwd=folder).split()
        if version not in told:
            raise Refused(f"the wheel says that it is {' '.join(told)}")
        bill = run(str(python), "-I", str(ROOT / "deploy/bill.py"), "--python", cwd=folder)
    (DIST / f"penstock-{version}.sbom.json").write_text(bill)


def build_image(target: str, version: str) -> None:
    """Build it by buildah with BUILDAH_OPTIONS, such as `--build-arg BASE=…`, label it, and take out its bill."""
    tag, storage = f"penstock:{version}-{target}", shlex.split(os.environ.get("BUILDAH_STORAGE", ""))
    labels = {"version": version, "title": f"penstock {target}"}
    if not run("git", "status", "--porcelain"):  # else no commit has this version yet
        labels["revision"] = run("git", "rev-parse", "HEAD").strip()
    more = shlex.split(os.environ.get("BUILDAH_OPTIONS", ""))
    file = ["--file", str(ROOT / "deploy/Dockerfile"), "--tag", tag, str(ROOT)]
    run("buildah", *storage, "bud", "--layers", "--format", "docker", "--target", target, *more, *file)
    container = run("buildah", *storage, "from", tag).strip()
    try:
        # `bud --label` sets nothing on an image whose last layer is in the cache.
        words = [f"--label=org.opencontainers.image.{name}={value}" for name, value in labels.items()]
        run("buildah", *storage, "config", *words, container)
        run("buildah", *storage, "commit", "--quiet", "--format", "docker", container, tag)
        # An ordinary user may not mount it. `buildah run` can end before it has passed on what the command wrote.
        read = ("buildah", *storage, "run", container, "cat", "/app/sbom.json")
        bill = next((found for _ in range(BILL_TRIES) if (found := run(*read))), None)
        if bill is None:
            raise Refused(f"buildah gave an empty bill of materials of {tag}, {BILL_TRIES} times")
        (DIST / f"penstock-{version}-{target}.sbom.json").write_text(bill)
    finally:
        run("buildah", *storage, "rm", container)


def write_checksums() -> None:
    """As `sha256sum --check SHA256SUMS` reads them."""
    files = sorted(one for one in DIST.iterdir() if one.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def next_steps(version: str, *, images: bool) -> str:
    names = [f"penstock:{version}-{target}" for target in IMAGES if images]
    steps = [
        f"git commit --all --message 'Release {version}'   (if the version was new)",
        f"git tag --annotate v{version} --message v{version}",
        *(f"buildah push {name} REGISTRY/{name}" for name in names),
        "upload dist/ to your package index",
        f"make older-data VERSION={version}   (the next release is tested on what this one writes)",
    ]
    return "\n".join([f"dist/ has the release {version}. What is left to do:", *(f"  {one}" for one in steps)])


def run(*words: str, cwd: str | Path = ROOT) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(words, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
