"""A real nginx with the configuration that the docs and `deploy/nginx` have, on ports of this machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stock_clients import tool
from support import wait_until

ROOT = Path(__file__).parents[2]
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Folders of nginx."""


def nginx_command(folder: Path, http: str) -> list[str]:
    """Its command line. `http` is what stands in that context; all that it writes lies in `folder`."""
    places = " ".join(f"{name}_temp_path {folder}/{name};" for name in TEMPORARY)
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; events {{}}\n"
        f"http {{ access_log off; {places}\n{http}}}"
    )
    return [tool("nginx"), "-e", "stderr", "-p", str(folder), "-c", str(conf)]


@contextmanager
def running_nginx(folder: Path, http: str) -> Generator[None]:
    """Until its end, connections are accepted. Its log is `nginx.log` in `folder`."""
    log = folder / "nginx.log"
    with log.open("wb") as file:
        process = subprocess.Popen(nginx_command(folder, http), stderr=file)
    try:
        wait_until((folder / "pid").exists, 20, log.read_text)  # it listens before it writes this
        yield
    finally:
        process.terminate()
        process.wait(20)


def documented(port: int, gateways: Sequence[int]) -> str:
    """The part of the how-to for gateways at these ports: an upstream and a server with TLS."""
    (text,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/how-to/integrations.md").read_text(), re.S)
    (server,) = {re.sub(r"10[.\d:]+", "127.0.0.1:{}", one) for one in re.findall(r" +server 10.*\n", text)}
    text = re.sub(r"( +server 10.*\n)+", "".join(map(server.format, gateways)), text)
    text = text.replace("include /etc/nginx", f"include {ROOT}/deploy/nginx")
    return text.replace("listen 443", f"listen 127.0.0.1:{port}")


def without_tls(text: str) -> str:
    return re.sub(r" +ssl_.*;\n", "", text).replace(" ssl;", ";")
