"""People behind nginx and oauth2-proxy, as the how-to has it: a real login, and the person in the record of actions."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.go_tools import MAY_BUILD, go_program
from kit.identity_provider import SECRET, IdentityProvider
from kit.nginx import ROOT, running_nginx
from penstock.cli.paths import free_port
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import Process, System

pytestmark = MAY_BUILD

OAUTH2_PROXY = "github.com/oauth2-proxy/oauth2-proxy/v7@v7.15.6"
HEADER = "X-Auth-Request-Email"
LIMIT = {"outstanding": 10}
NAVIGATES = {"sec-fetch-mode": "navigate"}


@dataclass
class Site:
    gateway: Process
    people: str
    """Through nginx, for people."""
    programs: str
    """Through nginx, for programs with keys of their own."""
    provider: IdentityProvider
    key: str

    @contextmanager
    def browser(self, email: str | None = None) -> Generator[httpx.Client]:
        """One whose person has logged in, or nobody's."""
        with httpx.Client(
            base_url=self.people, follow_redirects=True, timeout=30, trust_env=False, headers=NAVIGATES
        ) as client:
            if email is not None:
                page = client.get("/v1/admin/audit")
                assert page.url.path == "/login", (page.url, page.text)
                shown = client.post(page.url, data={"email": email, "password": IdentityProvider.PASSWORD})
                assert (shown.status_code, shown.url.path) == (200, "/v1/admin/audit"), shown.text
            yield client

    def actions(self) -> list[dict[str, Any]]:
        """The newest first."""
        headers = {"x-api-key": self.key}
        return httpx.get(f"{self.gateway.url}/v1/admin/audit", headers=headers, timeout=30).json()["data"]


@pytest.fixture
def site(make_system: Callable[..., System], tmp_path: Path) -> Iterator[Site]:
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="ops", name="people", scopes=["read", "admin"])
    options = {"user_header": HEADER, "user_proxies": ["127.0.0.2"], "trusted_proxies": ["127.0.0.2"]}
    system = make_system(gateway_options=options, auth={"keys_file": str(keys)})
    system.create_topics()
    gateway = system.gateway().wait_ready()
    people, programs, proxy = free_port(), free_port(), free_port()
    included = (ROOT / "deploy/nginx/people.conf").read_text().replace("127.0.0.1:4180", f"127.0.0.1:{proxy}")
    (tmp_path / "operators-key.conf").write_text(f'proxy_set_header Authorization "Bearer {key}";')
    http = (
        f"include {ROOT}/deploy/nginx/gateways.conf; proxy_bind 127.0.0.2;\n"
        f"upstream penstock {{ server 127.0.0.1:{gateway.port} max_fails=0; }}\n"
        f"server {{ listen 127.0.0.1:{programs}; location / {{ proxy_pass http://penstock; }} }}\n"
        f"server {{ listen 127.0.0.1:{people};\n{included.replace('/etc/penstock', str(tmp_path))} }}\n"
    )
    with (
        IdentityProvider().serving() as provider,
        oauth2_proxy(tmp_path, proxy, people, provider),
        running_nginx(tmp_path, http),
    ):
        yield Site(gateway, f"http://127.0.0.1:{people}", f"http://127.0.0.1:{programs}", provider, key)


@contextmanager
def oauth2_proxy(folder: Path, port: int, people: int, provider: IdentityProvider) -> Generator[None]:
    """The real one, with the configuration of `deploy`."""
    text = (ROOT / "deploy/oauth2-proxy.cfg").read_text()
    text = text.replace("https://login.example", provider.url).replace("127.0.0.1:4180", f"127.0.0.1:{port}")
    text = text.replace("https://ops.penstock.example", f"http://127.0.0.1:{people}")
    config, log = folder / "oauth2-proxy.cfg", folder / "oauth2-proxy.log"
    config.write_text(text + "cookie_secure = false\n")
    secret = {"OAUTH2_PROXY_CLIENT_SECRET": SECRET, "OAUTH2_PROXY_COOKIE_SECRET": secrets.token_urlsafe(32)}
    command = [str(go_program(OAUTH2_PROXY)), "--config", str(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | secret, stdout=out, stderr=out)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ping", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, 30, log.read_text)
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_actions_of_people_are_recorded_by_name_and_no_name_can_be_forged(site: Site) -> None:
    with site.browser("ann@example.com") as ann, site.browser("bob@example.com") as bob:
        for person, tenant in ((ann, "a"), (bob, "b")):
            assert person.post(f"/v1/admin/limits/{tenant}", json=LIMIT).status_code == 200
        forged = ann.post("/v1/admin/limits/c", json=LIMIT, headers={HEADER: "eve@example.com", "x-api-key": "pk_x"})
        assert forged.status_code == 200, "the proxy puts its own in place of both"
        other_page = ann.post("/v1/admin/limits/d", json=LIMIT, headers={"origin": "https://evil.example"})
        assert other_page.status_code == 403, "a page of another site has the cookie of the login too"
        for path in ("", "/key_none", "/key_none/rotate"):
            assert "identity proxy" in ann.post(f"/v1/admin/keys{path}", json={}).text
        console = ann.get("/", headers={"accept": "text/html"})
        assert "Penstock" in console.text
        ticket = ann.post("/v1/tickets", json={"use": "session"}).json()["ticket"]
    direct = {"authorization": f"Bearer {ticket}"}
    assert httpx.post(f"{site.gateway.url}/v1/admin/limits/e", json=LIMIT, headers=direct).status_code == 200

    own = {"x-api-key": site.key}
    for url, status in ((site.gateway.url, 403), (site.programs, 200)):  # that proxy takes the name away
        answer = httpx.post(f"{url}/v1/admin/limits/f", json=LIMIT, headers={**own, HEADER: "eve@example.com"})
        assert answer.status_code == status, answer.text
    with site.browser() as nobody:
        polled = nobody.get("/v1/stats", headers={"sec-fetch-mode": "cors"})
        assert (polled.status_code, polled.json()["error"]["code"]) == (401, "unauthenticated")
        assert not nobody.cookies, "a login in another tab goes on"
        assert "wrong password" in nobody.post(nobody.get("/").url, data={"email": "ann@example.com"}).text
    limits = [one for one in site.actions() if "limit" in one["action"]]
    done = [(one["target"].rpartition("/")[2], one["user"], one["key_name"]) for one in limits]
    expected = [("f", None), ("e", "ann@example.com"), ("c", "ann@example.com"), ("b", "bob@example.com")]
    assert done == [(target, user, "people") for target, user in [*expected, ("a", "ann@example.com")]]
    assert {one["address"] for one in site.actions()} == {"127.0.0.1"}
