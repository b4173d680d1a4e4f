"""The gateway's service: what routes and sockets call, parted by subject. No HTTP in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.control import Control
from penstock.gateway.facts import Facts
from penstock.gateway.follower import Follower
from penstock.gateway.hub import Hub
from penstock.gateway.lookups import Lookups
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.submitting import Submitter
from penstock.gateway.subscriptions import Subscriptions
from penstock.gateway.threads import Threads
from penstock.gateway.view import View
from penstock.producers.artifacts import ArtifactStore
from penstock.producers.settings import KafkaSettings
from penstock.producers.transport import AsyncTransport
from penstock.schemas.codec import Codec


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayService:
    """Made when the gateway is connected to its Kafka."""

    settings: GatewaySettings
    kafka: KafkaSettings
    artifacts: ArtifactStore
    codec: Codec
    """For threads: it may ask a registry."""
    facts: Facts
    submitting: Submitter
    lookups: Lookups
    subscriptions: Subscriptions
    control: Control
    threads: Threads = field(default_factory=Threads)

    @classmethod
    def compose(
        cls,
        settings: GatewaySettings,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        hub: Hub,
        codec: Codec,
        artifacts: ArtifactStore,
        threads: Threads,
    ) -> GatewayService:
        kafka = settings.kafka_settings()
        facts, lookups = Facts(view, follower, hub), Lookups(view, follower, hub, threads)
        return cls(
            settings=settings,
            kafka=kafka,
            artifacts=artifacts,
            codec=codec,
            facts=facts,
            submitting=Submitter(settings, transport, view, follower, codec, facts.models),
            lookups=lookups,
            subscriptions=Subscriptions(view, follower, hub, kafka.names),
            control=Control(transport, view, follower, lookups, codec, kafka.names, artifacts),
            threads=threads,
        )
