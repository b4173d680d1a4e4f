"""A small OpenID Connect provider: its login page, the code flow of one client, signed identity tokens."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlencode, urlsplit

from cryptography.hazmat.primitives.asymmetric import rsa

from kit.http_server import Answer, Call, serving_http
from kit.token_endpoint import public_keys, signed_token

CLIENT, SECRET = "penstock", "of-the-proxy"


class IdentityProvider:
    """Anybody whose password is `PASSWORD` is who they say. A code is good once."""

    PASSWORD = "open sesame"

    def __init__(self) -> None:
        self.url = ""
        self._key = rsa.generate_private_key(65537, 2048)
        self._codes: dict[str, dict[str, str]] = {}

    def answer(self, call: Call) -> Answer:
        path, query = urlsplit(call.path).path, urlsplit(call.path).query
        match call.method, path:
            case "GET", "/.well-known/openid-configuration":
                names = {"authorization_endpoint": "login", "token_endpoint": "token", "jwks_uri": "keys"}
                found = {name: f"{self.url}/{place}" for name, place in names.items()}
                signs = {"id_token_signing_alg_values_supported": ["RS256"], "response_types_supported": ["code"]}
                return 200, {"issuer": self.url, "subject_types_supported": ["public"], **found, **signs}
            case "GET", "/keys":
                return 200, public_keys(self._key)
            case "GET", "/login":
                return 200, b"<form method=post><input name=email><input name=password></form>", {}
            case "POST", "/login":
                return self._logged_in(_fields(query), _fields(call.body.decode()))
            case "POST", "/token":
                return self._token(call)
        return 404, {}

    def _logged_in(self, asked: dict[str, str], given: dict[str, str]) -> Answer:
        if given.get("password") != self.PASSWORD or asked.get("client_id") != CLIENT:
            return 403, b"wrong password", {}
        code = secrets.token_urlsafe()
        self._codes[code] = {"email": given["email"], "nonce": asked.get("nonce", "")}
        return 302, b"", {"location": f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"}

    def _token(self, call: Call) -> Answer:
        sent = _fields(call.body.decode())
        basic = base64.b64decode(call.headers.get("authorization", "").removeprefix("Basic ")).decode()
        known = self._codes.pop(sent.get("code", ""), None)
        if known is None or f"{CLIENT}:{SECRET}" not in (basic, f"{sent.get('client_id')}:{sent.get('client_secret')}"):
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "sub": known["email"], "iat": now, "exp": now + 600}
        token = signed_token(self._key, {**claims, **known, "email_verified": True})
        return 200, {"access_token": secrets.token_urlsafe(), "token_type": "Bearer", "id_token": token}

    @contextmanager
    def serving(self) -> Iterator[IdentityProvider]:
        with serving_http(self.answer) as server:
            self.url = server.url
            yield self


def _fields(text: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(text).items()}
