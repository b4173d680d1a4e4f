"""A broker that checks rights, and taking rights away from everybody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from penstock.cli.rights import Right
from penstock.common.settings import KafkaSettings
from support import wait_until


def guarded_broker(folder: Path) -> EmbeddedKafka:
    """Who has no rights on a resource may use it, unless somebody was given some."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    return EmbeddedKafka(folder, free_port(), properties=properties)


AUTHORIZER = "kafka.authorizer.logger"
_LINE = re.compile(
    r"Principal = User:(\S+) is (Allowed|Denied) operation = (\w+) from host = \S+ on resource = (\w+):LITERAL:(\S+)"
)


class Decision(NamedTuple):
    """What the broker's authorizer decided about one operation of a user. `kind`: Topic, Group, Cluster, …"""

    user: str
    allowed: bool
    operation: str
    kind: str
    name: str


class StrictBroker(EmbeddedKafka):
    """Denies all that no rule allows, and records each decision. Users authenticate by PLAIN, each with its own name
    as its password. The plaintext listener is the super user's.
    """

    def __init__(self, folder: Path, users: Iterable[str]) -> None:
        port, controller, self.secured_port = free_port(), free_port(), free_port()
        names = " ".join(f'user_{user}="{user}"' for user in users)
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        super().__init__(
            folder,
            port,
            properties={
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "controller.quorum.voters": f"1@127.0.0.1:{controller}",
                "listeners": f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{self.secured_port},"
                f"CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{self.secured_port}",
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
                "SASL_PLAINTEXT:SASL_PLAINTEXT",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{login} required {names};",
            },
            jvm_options=[f"-Dorg.slf4j.simpleLogger.log.{AUTHORIZER}=debug"],
        )

    def kafka(self, user: str, prefix: str = "") -> KafkaSettings:
        """A client of this user."""
        return KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{self.secured_port}", topic_prefix=prefix, security=security_of(user)
        )

    def env(self, user: str) -> dict[str, str]:
        """Variables by which a process is this user's client."""
        return {
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": f"127.0.0.1:{self.secured_port}",
            "PENSTOCK_KAFKA__SECURITY": json.dumps(security_of(user)),
        }

    def decisions(self) -> set[Decision]:
        """All so far, but those of the super user."""
        found = _LINE.findall(self.log.read_text(errors="replace"))
        return {Decision(user, word == "Allowed", *rest) for user, word, *rest in found if user != "ANONYMOUS"}


def security_of(user: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": user,
    }


class Rights:
    """On one resource at a time."""

    def __init__(self, bootstrap: str) -> None:
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def grant(self, user: str, rights: Iterable[Right]) -> None:
        """What `penstock topics acls` prints."""
        for made in self.admin.create_acls([_binding(user, right) for right in rights]).values():
            made.result(30)

    def take(self, user: str, right: Right) -> None:
        one = _binding(user, right)
        which = AclBindingFilter(
            one.restype, one.name, one.resource_pattern_type, one.principal, None, one.operation, one.permission_type
        )
        assert self.admin.delete_acls([which])[which].result(30), f"{user} does not have {right}"

    def refuse(self, kind: ResourceType, name: str, operation: str = "ALL") -> None:
        """Nobody may do this with it."""
        acls = [
            AclBinding(kind, name, ResourcePatternType.LITERAL, "User:*", "*", AclOperation[what], rule)
            for rule, what in ((AclPermissionType.DENY, operation), (AclPermissionType.ALLOW, "ALL"))
        ]
        for made in self.admin.create_acls(acls).values():
            made.result(30)
        self._in_force(kind, name, len(acls))

    def allow(self, kind: ResourceType, name: str) -> None:
        """Everybody may do everything with it again."""
        found = _on(kind, name)
        self.admin.delete_acls([found])[found].result(30)
        self._in_force(kind, name, 0)

    def _in_force(self, kind: ResourceType, name: str, rules: int) -> None:
        """The controller answers before the broker has applied what was changed."""

        def found() -> int:
            return len(self.admin.describe_acls(_on(kind, name)).result(30))

        wait_until(lambda: found() >= rules if rules else found() == 0, 30, lambda: f"{found()} rules on {name}")


def _on(kind: ResourceType, name: str) -> AclBindingFilter:
    return AclBindingFilter(
        kind, name, ResourcePatternType.LITERAL, None, None, AclOperation.ANY, AclPermissionType.ANY
    )


def _binding(user: str, right: Right) -> AclBinding:
    kinds = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "cluster": ResourceType.BROKER}
    pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
    operation, allow = AclOperation[right.operation], AclPermissionType.ALLOW
    return AclBinding(kinds[right.kind], right.name, pattern, f"User:{user}", "*", operation, allow)
