"""The jars of Apache Kafka in the user's cache: fetched once by jgo, checked against digests shipped with Penstock."""

from __future__ import annotations

import hashlib
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.installs import install_command
from penstock.cli.paths import Progress, cache_dir, exclusive, require_space, silent
from penstock.schemas.texts import shortened

KAFKA_VERSION = "4.3.1"
# slf4j must be the 1.7 line: Kafka's own binding cannot be resolved without Maven.
ENDPOINT = f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.slf4j:slf4j-simple:1.7.36"
JARS_BYTES = 43_000_000


def pinned_digests() -> dict[str, str]:
    """File name to SHA-256 of every jar, as released: one `digest  name` a line."""
    text = resources.files("penstock.cli").joinpath("kafka_jars.sha256").read_text()
    return {name: digest for digest, name in (line.split() for line in text.splitlines() if line)}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wrong_jars(folder: Path) -> list[str]:
    """The names of jars that are missing from `folder` or differ from their digest."""
    return [
        name
        for name, digest in pinned_digests().items()
        if not (folder / name).is_file() or sha256(folder / name) != digest
    ]


def kafka_jars(progress: Progress = silent) -> list[Path]:
    """All jars of Kafka, verified. The first call fetches 43 MB; later ones take a tenth of a second.

    Raises CliFailure when they are not in the cache and cannot be fetched.
    """
    folder = cache_dir() / f"kafka-{KAFKA_VERSION}"
    with exclusive(folder.with_suffix(".lock"), progress):
        if wrong_jars(folder):
            require_space(folder, 3 * JARS_BYTES, "the jars of Apache Kafka")
            progress(f"fetching Apache Kafka {KAFKA_VERSION} ({len(pinned_digests())} jars, {JARS_BYTES // 10**6} MB)")
            _fetch(folder)
    return sorted(folder / name for name in pinned_digests())


def _fetch(folder: Path) -> None:
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for jar in _resolve(staging / "jgo"):
        shutil.copyfile(jar, staging / jar.name)
    shutil.rmtree(staging / "jgo", ignore_errors=True)
    if wrong := wrong_jars(staging):
        raise CliFailure(
            f"Kafka's jar {wrong[0]} is not what was released: remove its folder under ~/.m2/repository"
            " (a broken download is kept there), then try again"
        )
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _resolve(workspace: Path) -> list[Path]:
    try:
        import jgo
    except ImportError as error:
        raise CliFailure(f"the embedded broker is not installed: {install_command('embedded')}") from error
    try:
        environment: Any = jgo.build(ENDPOINT, cache_dir=workspace)
        return [Path(jar) for jar in environment.all_jars]
    except Exception as error:  # jgo, requests and its parsers each raise their own kind
        reason = shortened(str(error).splitlines()[0] if str(error) else type(error).__name__, 300)
        raise CliFailure(
            f"the jars of Apache Kafka {KAFKA_VERSION} cannot be fetched ({reason}): connect to the network once,"
            f" or copy {cache_dir()} from a machine that has it, or use a cluster with --bootstrap-servers",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
