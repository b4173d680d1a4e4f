"""A schema registry behind HTTPS, with basic authentication, a bearer token or client certificates."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kit.certificates import Authority
from kit.http_server import Answer, Call
from penstock.schemas.codec import SCHEMA_IDS
from penstock.schemas.errors import RegistryUnavailable
from penstock.schemas.records import ControlCommand
from penstock.schemas.registry import RegistryAccess, registry_codecs
from registry_server import Registry
from support import in_background
from system import System

PASSWORD, TOKEN = "hush:1", "a.b.c"
ALLOWED = {"Basic " + base64.b64encode(f"penstock:{PASSWORD}".encode()).decode(), f"Bearer {TOKEN}"}


class Secured(Registry):
    """Answers 401 to a call without one of the credentials, unless the client has a certificate of `authority`."""

    def __init__(self, authority: Authority, *, mutual: bool = False) -> None:
        super().__init__()
        self.registered: list[str] = []
        self._mutual = mutual
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.issue("registry", hosts=["127.0.0.1"]).both)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(authority.certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that refuses the certificate hangs up."""

    @property
    def secured_url(self) -> str:
        return f"https://127.0.0.1:{self.server_port}"

    def _answer(self, call: Call) -> Answer:
        if not self._mutual and call.headers.get("authorization") not in ALLOWED:
            return 401, {"error_code": 401, "message": "Unauthorized"}
        if call.method == "POST":
            self.registered.append(call.path)
        return super()._answer(call)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("registry"))


@pytest.fixture
def registry(authority: Authority) -> Iterator[Secured]:
    with in_background(made := Secured(authority)):
        yield made


@pytest.fixture
def access(registry: Secured, authority: Authority) -> RegistryAccess:
    trusted = str(authority.certificate)
    return RegistryAccess(url=registry.secured_url, username="penstock", password=PASSWORD, ca_location=trusted)


def registers(access: RegistryAccess) -> None:
    codecs = registry_codecs(access, write=True)
    command = ControlCommand(request_id="r", tenant="default", kind="cancel", created_at=1)
    assert codecs.blocking.decode(codecs.blocking.encode(command), ControlCommand) == command


def test_basic_authentication_and_a_token_are_taken(registry: Secured, access: RegistryAccess) -> None:
    registers(access)
    registers(replace(access, username=None, password=None, token=TOKEN))
    assert len(registry.registered) == 2 * len(SCHEMA_IDS)


def test_a_client_certificate_is_taken_and_asked_for(authority: Authority) -> None:
    with in_background(server := Secured(authority, mutual=True)):
        pair = authority.issue("penstock")
        access = RegistryAccess(url=server.secured_url, ca_location=str(authority.certificate))
        registers(replace(access, certificate_location=str(pair.certificate), key_location=str(pair.key)))
        registers(replace(access, certificate_location=str(pair.both)))
        with pytest.raises(RegistryUnavailable, match="no schema registry at https"):
            registers(access)


Change = Callable[[RegistryAccess, Path], RegistryAccess]
WRONG: dict[str, tuple[Change, str]] = {
    "password": (
        lambda access, _: replace(access, password="wrong"),
        r"refuses this client \(401\): check schema_registry.username and schema_registry.password",
    ),
    "token": (lambda access, _: replace(access, username=None, token="x"), r"\(401\).*schema_registry.token"),
    "no authority": (
        lambda access, _: replace(access, ca_location=None),
        "CERTIFICATE_VERIFY_FAILED.*: see schema_registry.ca_location",
    ),
    "no certificate in the file": (
        lambda access, folder: replace(access, certificate_location=str(folder / "empty")),
        "schema_registry.ca_location, certificate_location, key_location or key_password is wrong",
    ),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line_with_the_settings_name(
    access: RegistryAccess, tmp_path: Path, change: Change, said: str
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(RegistryUnavailable, match=said) as caught:
        registers(change(access, tmp_path))
    assert "\n" not in caught.value.message
    assert PASSWORD not in caught.value.message + repr(access)


def test_a_worker_uses_it_and_a_wrong_password_ends_its_start(
    make_system: Callable[..., System], registry: Secured, authority: Authority, tmp_path: Path
) -> None:
    system, secret = make_system(), tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    prefix = "PENSTOCK_SCHEMA_REGISTRY__"
    env = {
        f"{prefix}URL": registry.secured_url,
        f"{prefix}WRITE": "true",
        f"{prefix}USERNAME": "penstock",
        f"{prefix}PASSWORD_FILE": str(secret),
        f"{prefix}CA_LOCATION": str(authority.certificate),
    }
    system.worker(env=env).wait_ready()
    assert len(registry.registered) == len(SCHEMA_IDS)
    secret.write_text("wrong")
    refused = system.worker("w2", env=env)
    assert refused.wait_dead() == 3
    (line,) = [line for line in refused.log.read_text().splitlines() if "schema_registry.password" in line]
    assert "refuses this client (401)" in line
