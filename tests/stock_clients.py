"""Stock Kafka producers of other languages, each made once into the user's cache and run with its own defaults."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from penstock.cli.embedded_kafka import java
from penstock.cli.kafka_jars import kafka_jars
from penstock.cli.paths import cache_dir, exclusive

SOURCES = Path(__file__).parent / "integration" / "stock"
ALL_CODECS = ("default", "none", "gzip", "snappy", "lz4", "zstd")
KAFKAJS = "kafkajs@2.2.4"
RUN_LIMIT_S = 40.0

Command = Callable[[str, str, str, Sequence[Path]], list[str]]
"""The command line that sends files: bootstrap servers, topic, codec, files."""


@dataclass(frozen=True, kw_only=True)
class StockClient:
    """A producer by its name, the codecs that it has without plugins, and how it is made ready."""

    name: str
    codecs: tuple[str, ...]
    prepare: Callable[[], Command]

    def send(self, bootstrap: str, topic: str, codec: str, files: Sequence[Path]) -> None:
        """One record a file; AssertionError with the client's words when it fails."""
        command = self.prepare()(bootstrap, topic, codec, files)
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
        assert done.returncode == 0, f"{self.name} {codec}: {done.stdout}\n{done.stderr}"


def missing(what: str) -> NoReturn:
    """A service or tool that is not here: a laptop skips the test, CI fails."""
    if os.environ.get("CI") or os.environ.get("PENSTOCK_CI"):
        pytest.fail(what)
    pytest.skip(what)


def tool(name: str) -> str:
    return shutil.which(name) or missing(f"{name} is not installed")


def _made(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """The folder in the cache that `make` fills, once for each state of the sources."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    folder = cache_dir() / "stock-clients" / f"{name}-{digest}"
    with exclusive(folder.with_suffix(".lock")):
        if not folder.exists():
            staging = folder.with_suffix(".tmp")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            make(staging)
            staging.rename(folder)
    return folder


def _run(command: Sequence[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **env}
    )


def _go(library: str) -> Command:
    sources = [SOURCES / "go" / name for name in ("main.go", "go.mod", "go.sum")]

    def make(folder: Path) -> None:
        go = tool("go")
        for path in sources:
            shutil.copy(path, folder)
        fetched = _run([go, "mod", "download"], folder)
        if fetched.returncode != 0:
            missing(f"the Go modules cannot be fetched: {fetched.stderr[-300:]}")
        built = _run([go, "build", "-buildvcs=false", "-mod=readonly", "-o", "produce", "."], folder)
        assert built.returncode == 0, built.stderr

    program = str(_made("go", sources, make) / "produce")
    return lambda bootstrap, topic, codec, files: [program, library, bootstrap, topic, codec, *map(str, files)]


def installed_by_npm(package: str, *beside: Path) -> Path:
    """A folder with the package (or several, with spaces between) in its node_modules, and copies of `beside`."""
    npm = tool("npm")

    def make(folder: Path) -> None:
        for path in beside:
            shutil.copy(path, folder)
        options = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = _run([npm, "install", "--prefix", str(folder), *options, *package.split()], folder)
        if done.returncode != 0:
            missing(f"{package} cannot be fetched: {done.stderr[-300:]}")

    return _made(re.sub(r"[@/ ]+", "-", package).strip("-"), beside, make)


def _java() -> Command:
    """Compiled by a JDK and run by the Java that comes with the embedded broker, whose jars hold the client."""
    source = SOURCES / "java" / "Produce.java"
    jars = ":".join(str(jar) for jar in kafka_jars())

    def make(folder: Path) -> None:
        done = _run([tool("javac"), "--release", "17", "-cp", jars, "-d", str(folder), str(source)], folder)
        assert done.returncode == 0, done.stderr

    classes = _made("java", [source], make)
    start = [java(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{classes}:{jars}"]
    quiet = ["--sun-misc-unsafe-memory-access=allow", "--enable-native-access=ALL-UNNAMED"]
    return lambda bootstrap, topic, codec, files: [*start, *quiet, "Produce", bootstrap, topic, codec, *map(str, files)]


def _node() -> Command:
    source = SOURCES / "node" / "produce.js"
    node = tool("node")

    program = str(installed_by_npm(KAFKAJS, source) / "produce.js")
    return lambda bootstrap, topic, codec, files: [node, program, bootstrap, topic, codec, *map(str, files)]


def _kcat() -> Command:
    kcat = tool("kcat")

    def command(bootstrap: str, topic: str, codec: str, files: Sequence[Path]) -> list[str]:
        compression = [] if codec == "default" else ["-z", codec]
        return [kcat, "-P", "-b", bootstrap, "-t", topic, *compression, *map(str, files)]

    return command


CLIENTS = (
    StockClient(name="kafka-go", codecs=ALL_CODECS, prepare=lambda: _go("kafka-go")),
    StockClient(name="franz-go", codecs=ALL_CODECS, prepare=lambda: _go("franz-go")),
    StockClient(name="java", codecs=ALL_CODECS, prepare=_java),
    # kafkajs has the others as plugins only.
    StockClient(name="kafkajs", codecs=("default", "none", "gzip"), prepare=_node),
    StockClient(name="kcat", codecs=ALL_CODECS, prepare=_kcat),
)
