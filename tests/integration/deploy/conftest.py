"""The services of docker-compose.yml as processes, with their commands, the image's settings and the proxy's.

The user is the image's, 10001: it may read everything and write to nothing but the volume, which is a folder here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kit.nginx import nginx_command
from penstock.cli.paths import cache_dir, free_port
from support import wait_until

ROOT = Path(__file__).parents[3]
USER = 10001
GATEWAYS = {"gateway": "127.0.1.1", "gateway 2": "127.0.1.2", "gateway 3": "127.0.1.3"}
"""Containers of one service and their addresses: all use one port."""
SETPRIV = [
    "setpriv",
    f"--reuid={USER}",
    f"--regid={USER}",
    "--clear-groups",
    # The interpreter may lie in root's home; what may be read is not what is asked here.
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]


class Resolver:
    """Docker's resolver: answers a question for a service with the addresses of its containers."""

    def __init__(self, addresses: list[str]) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._answers = b"".join(
            # The name of the question, type A, class IN, valid for 600 s as with Docker, four bytes of address.
            b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x02\x58\x00\x04" + socket.inet_aton(one)
            for one in addresses
        )
        self._count = len(addresses)
        self.address = "{}:{}".format(*self._socket.getsockname())
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                asked, client = self._socket.recvfrom(512)
                counts = b"\x00\x01" + self._count.to_bytes(2, "big") + b"\x00\x00\x00\x00"
                self._socket.sendto(asked[:2] + b"\x81\x80" + counts + asked[12:] + self._answers, client)

    def close(self) -> None:
        self._socket.close()


class Compose:
    """The services; `fill` puts a folder in place of the volume's mount point. `worker 2` is a second container."""

    def __init__(self, folder: Path, kafka: str, prefix: str) -> None:
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self.folder = folder
        self.app = folder / "app"
        self.app.mkdir()  # root's, as the image's folders
        (mount,) = {volume for name in ("gateway", "worker") for volume in self.services[name]["volumes"]}
        assert mount == "data:/data"
        self.data = folder / "data"
        self.data.mkdir()
        self.config = folder / "penstock.toml"
        self.config.write_text(self.fill((ROOT / "deploy/penstock.toml").read_text()).replace("kafka:9092", kafka))
        self.ports = {"worker": free_port(), "worker 2": free_port(), "proxy": free_port()}
        self.ports |= dict.fromkeys(GATEWAYS, free_port("127.0.1.1"))
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            "HOME": "/nonexistent",
            "PENSTOCK_CACHE": str(self.data / "cache"),
            "PENSTOCK_CONFIG": str(self.config),
            "PENSTOCK_AUTH__TICKET_KEY": "of .env",
            # What differs from the containers: one broker for all tests, one network.
            "PENSTOCK_KAFKA__TOPIC_PREFIX": prefix,
            "PENSTOCK_TOPICS__PARTITIONS": "4",
            "PENSTOCK_WORKER__GROUP_ID": f"{prefix}worker",
            "PENSTOCK_GATEWAY__PORT": str(self.ports["gateway"]),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.key = ""

    def fill(self, text: str) -> str:
        return text.replace("/data/", f"{self.data}/")

    def start(self, name: str) -> None:
        service = self.services[name.partition(" ")[0]]
        argv = [*service.get("entrypoint", ["penstock"]), *service["command"]]
        own = {
            "PENSTOCK_WORKER__HEALTH_PORT": str(self.ports.get(name, 0)),
            "PENSTOCK_GATEWAY__HOST": GATEWAYS.get(name, ""),
        }
        self._run(name, [*SETPRIV, *map(self.fill, argv)], {**self.environment, **own})

    def start_proxy(self, resolver: str) -> None:
        """nginx with the files that the service `proxy` mounts; addresses, ports and its temporary folder differ."""
        parts, included = "", dict[str, str]()
        for volume in self.services["proxy"]["volumes"]:
            source, target, _ = volume.split(":")
            if target.startswith("/etc/nginx/conf.d/"):  # nginx's image includes these in http
                parts += (ROOT / source).read_text()
            else:
                included[target] = str(ROOT / source)
        parts = re.sub("(?<=include )[^;]+", lambda named: included[named[0]], parts)
        parts = parts.replace("127.0.0.11", resolver).replace("$gateways:8000", f"$gateways:{self.ports['gateway']}")
        parts = parts.replace("listen 8000", f"listen 127.0.0.1:{self.ports['proxy']}")
        self._run("proxy", nginx_command(self.folder, parts), dict(os.environ))

    def _run(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(argv, cwd=self.app, env=env, stdout=log, stderr=subprocess.STDOUT)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def url(self, name: str) -> str:
        return f"http://{GATEWAYS.get(name, '127.0.0.1')}:{self.ports[name]}"

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=self.url(name), headers={"authorization": f"Bearer {self.key}"}, timeout=120)

    def wait_ready(self, name: str, assigned: int = 0) -> dict[str, Any]:
        """What it says when it is ready, and has so many partitions."""
        said: dict[str, Any] = {}

        def ready() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            try:
                answer = httpx.get(self.url(name) + "/readyz", timeout=2)
                said.update(answer.json())
            except (httpx.HTTPError, ValueError):  # nginx has a page of its own while no gateway is there
                return False
            return answer.status_code == 200 and (not assigned or said["assigned"] == assigned)

        wait_until(ready, 120, lambda: (said, self.log(name)))
        return said

    def stop(self, name: str) -> int:
        self.processes[name].send_signal(signal.SIGTERM)
        grace_s = float(self.services[name.partition(" ")[0]]["stop_grace_period"].removesuffix("s"))
        return self.processes[name].wait(grace_s)


@pytest.fixture(scope="module")
def compose(kafka: Any, tmp_path_factory: pytest.TempPathFactory, smollm2: Path, minilm: Path) -> Iterator[Compose]:
    """docker compose up --scale gateway=3 --scale worker=2"""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can run processes as the image's user")
    made = Compose(tmp_path_factory.mktemp("compose"), kafka.bootstrap_servers, f"t{uuid.uuid4().hex[:6]}-")
    made.folder.chmod(0o755)
    shutil.copytree(cache_dir() / "models", made.data / "cache" / "models", copy_function=link_or_copy)
    for path in (made.data, *made.data.rglob("*")):
        if path.is_dir():
            os.chown(path, USER, USER)
    resolver = Resolver(list(GATEWAYS.values()))
    try:
        made.start("init")
        assert made.processes["init"].wait(120) == 0, made.log("init")
        made.key = next(line for line in made.log("init").splitlines() if line.startswith("pk"))
        for name in ("worker", "worker 2", *GATEWAYS):
            made.start(name)
        made.start_proxy(resolver.address)
        yield made
    finally:
        resolver.close()
        for process in made.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(20)


def link_or_copy(source: str, target: str) -> None:
    """Models are large; they are only read. A lock file is written to: it must be the user's own."""
    if source.endswith(".lock"):
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
