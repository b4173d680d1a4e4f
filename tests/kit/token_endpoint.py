"""An OAuth token endpoint (client credentials, RFC 6749): signs JWTs, whose keys a broker reads from a file."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from kit.http_server import Answer, Call, serving_http

SECRET = "of-the-client"
AUDIENCE = "kafka"
ISSUER = "test"
_ALGORITHM = {"alg": "RS256", "kid": "test"}


class TokenEndpoint:
    """Any client id with `SECRET` gets a token, whose subject is the id, for `lifetime_s`. `issued`: by client id."""

    def __init__(self, keys: Path, lifetime_s: int = 60) -> None:
        self.lifetime_s = lifetime_s
        self.issued: dict[str, int] = {}
        self.url = ""
        self._key = rsa.generate_private_key(65537, 2048)
        keys.write_text(json.dumps(public_keys(self._key)))

    def answer(self, call: Call) -> Answer:
        kind, _, sent = call.headers.get("authorization", "").partition(" ")
        client, _, secret = base64.b64decode(sent).decode().partition(":") if kind == "Basic" else ("", "", "")
        if secret != SECRET or b"grant_type=client_credentials" not in call.body:
            return 401, {"error": "invalid_client", "error_description": "unknown client or wrong secret"}
        self.issued[client] = self.issued.get(client, 0) + 1
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": client, "iat": now, "exp": now + self.lifetime_s}
        token = signed_token(self._key, claims)
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": self.lifetime_s}

    @contextmanager
    def serving(self) -> Iterator[None]:
        with serving_http(self.answer) as server:
            self.url = f"{server.url}/token"
            yield


def public_keys(key: rsa.RSAPrivateKey) -> dict[str, Any]:
    """A JWK Set (RFC 7517)."""
    numbers = key.public_key().public_numbers()
    public = {"n": _base64(numbers.n.to_bytes(256)), "e": _base64(numbers.e.to_bytes(3))}
    return {"keys": [{"kty": "RSA", "use": "sig", **_ALGORITHM, **public}]}


def signed_token(key: rsa.RSAPrivateKey, claims: Mapping[str, Any]) -> str:
    """A JWT."""
    signed = f"{_base64(json.dumps(_ALGORITHM).encode())}.{_base64(json.dumps(claims).encode())}"
    return f"{signed}.{_base64(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
