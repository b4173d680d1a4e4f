"""A broker that checks rights, and taking rights away from everybody."""

from __future__ import annotations

from pathlib import Path

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
from support import wait_until


def guarded_broker(folder: Path) -> EmbeddedKafka:
    """Who has no rights on a resource may use it, unless somebody was given some."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    return EmbeddedKafka(folder, free_port(), properties=properties)


class Rights:
    """On one resource at a time."""

    def __init__(self, bootstrap: str) -> None:
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

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
