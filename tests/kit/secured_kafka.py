"""A broker with a listener for each way to secure its clients, by the names that `LISTENERS` has.

Its listener PLAINTEXT is for itself and for the tests: a client there is a super user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from kit.certificates import Authority
from kit.token_endpoint import AUDIENCE, ISSUER, SECRET, TokenEndpoint
from penstock.cli.embedded_kafka import EmbeddedKafka, answers
from penstock.cli.paths import free_port
from support import wait_until

HOST = "localhost"
LISTENERS = {
    "sasl": "SASL_PLAINTEXT",
    "sasltls": "SASL_SSL",
    "tls": "SSL",
    "mtls": "SSL",
    "expired": "SSL",
}
"""The protocol of each. `expired` has a certificate that is no longer valid; `mtls` requires one of the client."""
MECHANISMS = ("PLAIN", "SCRAM-SHA-512", "OAUTHBEARER")
PASSWORD = "correct-horse"
PENSTOCK = "penstock"
"""The user that a running broker knows."""

_MODULES = "org.apache.kafka.common.security"
_HANDLER = f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"


class SecuredKafka:
    """`users` can log in by PLAIN, and those of `add_user` by SCRAM. OAUTHBEARER and `mtls` take any name.

    With `authorizer` Kafka's StandardAuthorizer denies what no rule allows, except to `super_users` and on PLAINTEXT.
    """

    def __init__(
        self,
        folder: Path,
        *,
        users: Sequence[str] = (PENSTOCK,),
        authorizer: bool = False,
        super_users: Sequence[str] = (),
        token_lifetime_s: int = 60,
    ) -> None:
        self.authority = Authority(folder / "certificates")
        self.tokens = TokenEndpoint(folder / "jwks.json", token_lifetime_s)
        self.ports = {name: free_port() for name in LISTENERS}
        self._users = users
        self._port = free_port()
        keys = (folder / "jwks.json").as_uri()
        rights = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": ";".join(f"User:{user}" for user in ("ANONYMOUS", *super_users)),
        }
        self.broker = EmbeddedKafka(
            folder / "kafka",
            self._port,
            properties={
                **self._listeners(),
                **self._tls(),
                **self._sasl(keys),
                **(rights if authorizer else {}),
            },
            jvm_options=[f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys}"],
        )

    @property
    def bootstrap_servers(self) -> str:
        """The listener of the tests, without security."""
        return self.broker.bootstrap_servers

    def at(self, listener: str) -> str:
        """The bootstrap servers of a listener."""
        return f"{HOST}:{self.ports[listener]}"

    def security(self, listener: str, mechanism: str | None = None, user: str = PENSTOCK) -> dict[str, str]:
        """`[kafka] security` of `user` at a listener. Each call with `mtls` issues a certificate."""
        found = {"security.protocol": LISTENERS[listener]}
        if found["security.protocol"].endswith("SSL"):
            found["ssl.ca.location"] = str(self.authority.certificate)
        if listener == "mtls":
            pair = self.authority.issue(user)
            found |= {"ssl.certificate.location": str(pair.certificate), "ssl.key.location": str(pair.key)}
        if mechanism == "OAUTHBEARER":
            found |= {
                "sasl.mechanism": mechanism,
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": self.tokens.url,
                "sasl.oauthbearer.client.id": user,
                "sasl.oauthbearer.client.secret": SECRET,
                "sasl.oauthbearer.scope": "kafka",
            }
        elif mechanism is not None:
            found |= {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": PASSWORD}
        return found

    def add_user(self, user: str) -> None:
        """Returns when `user` can log in by SCRAM-SHA-512, with `PASSWORD`."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        made = UserScramCredentialUpsertion(user, credentials, PASSWORD.encode())
        admin.alter_user_scram_credentials([made])[user].result(30)
        security = self.security("sasl", "SCRAM-SHA-512", user)
        wait_until(lambda: answers(self.at("sasl"), 5, security), 30, lambda: f"{user} cannot log in")

    @contextmanager
    def running(self) -> Iterator[SecuredKafka]:
        with self.tokens.serving(), self.broker:
            self.add_user(PENSTOCK)
            yield self

    def _listeners(self) -> dict[str, str]:
        controller = f"127.0.0.1:{free_port()}"
        own = f"PLAINTEXT://127.0.0.1:{self._port}"
        others = ",".join(f"{name.upper()}://{HOST}:{port}" for name, port in self.ports.items())
        protocols = ",".join(f"{name.upper()}:{protocol}" for name, protocol in LISTENERS.items())
        return {
            "listeners": f"{own},CONTROLLER://{controller},{others}",
            "controller.quorum.voters": f"1@{controller}",
            "advertised.listeners": f"{own},{others}",
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,{protocols}",
        }

    def _tls(self) -> dict[str, str]:
        server = self.authority.issue("broker", hosts=[HOST])
        expired = self.authority.issue("expired", hosts=[HOST], lifetime=timedelta(days=-1))
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(server.both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.certificate),
            "listener.name.expired.ssl.keystore.type": "PEM",
            "listener.name.expired.ssl.keystore.location": str(expired.both),
            "listener.name.mtls.ssl.client.auth": "required",
            "listener.name.mtls.ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
        }

    def _sasl(self, keys: str) -> dict[str, str]:
        users = " ".join(f'user_{user}="{PASSWORD}"' for user in self._users)
        found = {"sasl.enabled.mechanisms": ",".join(MECHANISMS)}
        for name in ("sasl", "sasltls"):
            listener = f"listener.name.{name}"
            found |= {
                f"{listener}.plain.sasl.jaas.config": f"{_MODULES}.plain.PlainLoginModule required {users};",
                f"{listener}.scram-sha-512.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
                f"{listener}.oauthbearer.sasl.jaas.config": (
                    f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub='x';"
                ),
                f"{listener}.oauthbearer.sasl.server.callback.handler.class": _HANDLER,
                f"{listener}.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": keys,
                f"{listener}.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
                f"{listener}.oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
                # The broker ends the connection of a client whose token has expired.
                f"{listener}.oauthbearer.connections.max.reauth.ms": "3600000",
            }
        return found
