"""The gateway's service: what routes and sockets call, parted by subject. No HTTP in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweeping import Sweeper
from penstock.common.settings import KafkaSettings
from penstock.gateway.conversations.layout import Layout
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.retention import Retention
from penstock.gateway.limits.settings import retention_of
from penstock.gateway.producing import ServiceTransport, rights_probe
from penstock.gateway.service.artifact_sweeps import ArtifactSweeps
from penstock.gateway.service.bulk_commands import BulkCommands
from penstock.gateway.service.control import Control
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.service.conversation_feeds import Feeds
from penstock.gateway.service.conversation_sweeps import ConversationSweeps
from penstock.gateway.service.deleting import Deleting
from penstock.gateway.service.deliveries import DeliveryLookups
from penstock.gateway.service.dependencies import Dependencies, artifact_probe
from penstock.gateway.service.ending_lost import EndingLost
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.forking import Forking
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.model_orders import ModelOrders, orders_probe
from penstock.gateway.service.open_transactions import OpenTransactions
from penstock.gateway.service.redriving import Redriving
from penstock.gateway.service.request_records import RequestRecords
from penstock.gateway.service.run_times import RunTimes
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.service.turns import Turns
from penstock.gateway.service.withdrawing import Withdrawing
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayService:
    """Made when the gateway is connected to its Kafka."""

    settings: GatewaySettings
    kafka: KafkaSettings
    artifacts: ArtifactStore
    facts: Facts
    submitting: Submitter
    lookups: Lookups
    turns: Turns
    deliveries: DeliveryLookups
    records: RequestRecords
    subscriptions: Subscriptions
    control: Control
    bulk_commands: BulkCommands
    ending_lost: EndingLost
    model_orders: ModelOrders
    withdrawing: Withdrawing
    sweeps: ArtifactSweeps
    dependencies: Dependencies
    transactions: OpenTransactions
    conversations: Conversations
    layout: Layout
    conversation_facts: FactsOfConversations
    forking: Forking
    deleting: Deleting
    retention: Retention
    conversation_sweeps: ConversationSweeps
    feeds: Feeds
    redriving: Redriving
    threads: Threads = field(default_factory=Threads)

    async def stored(self, tenant: str, work: Callable[[ArtifactStore], T]) -> T:
        """What the artifact store does for a tenant, on one of its threads. Raises what `work` raises."""
        return await self.threads.artifacts.run_for(tenant, work, self.artifacts)

    async def erase(self, caller: Caller, request_id: str) -> None:
        """Erase a request that has ended, with its dead letters. Raises as `Control.erase`."""
        if (await self.lookups.find(caller.tenant, request_id)).done:  # its webhook may have one, however it ended
            await self.redriving.forget(caller, request_id)
        await self.control.erase(caller.tenant, request_id)

    @classmethod
    def compose(
        cls,
        settings: GatewaySettings,
        transport: ServiceTransport,
        view: View,
        follower: Follower,
        hub: Hub,
        codec: Codec,
        artifacts: ArtifactStore,
        threads: Threads,
        run_times: RunTimes,
        allowances: Allowances,
        outcomes: Outcomes,
        conversations: Conversations,
        layout: Layout,
        letters: LetterFollower,
    ) -> GatewayService:
        kafka = settings.kafka_settings()
        transactions = OpenTransactions(kafka, view, threads)
        facts = Facts(view, follower, hub, settings.gateway.worker_late_s, run_times, transactions)
        turns = Turns(view, threads)
        lookups = Lookups(view, follower, hub, threads, outcomes, turns)
        orders = ModelOrders(transport, facts, kafka, codec, threads, view.fleet.follow)
        control = Control(transport, view, follower, lookups, codec, kafka.names, artifacts, allowances, threads, turns)
        submitting = Submitter(settings, transport, view, follower, codec, allowances, facts, artifacts.check_place)
        kept = FactsOfConversations(transport, view, follower, layout, kafka, codec, threads)
        forking = Forking(transport, layout, conversations, kafka.names, codec, artifacts, threads)
        feeds, retention = Feeds(conversations, hub, threads), retention_of(settings.gateway.limits)
        deleting = Deleting(control, kept, forking, conversations, feeds, allowances, threads, retention)
        dependencies = Dependencies(
            {
                "artifacts": artifact_probe(artifacts, threads),
                "orders": orders_probe(orders),
                "rights": rights_probe(transport, kafka),
            },
            settings.gateway.probe_s,
        )
        transport.on_refused = partial(dependencies.probe_now, "rights")
        return cls(
            settings=settings,
            kafka=kafka,
            artifacts=artifacts,
            facts=facts,
            submitting=submitting,
            lookups=lookups,
            turns=turns,
            deliveries=DeliveryLookups(lookups, outcomes, kafka, codec, threads),
            records=RequestRecords(outcomes, codec, threads),
            subscriptions=Subscriptions(view, follower, hub, kafka.names, turns, facts.waits_unseen),
            control=control,
            bulk_commands=BulkCommands(control, view, lookups, allowances),
            ending_lost=EndingLost(view, follower, facts, control, kafka, threads),
            model_orders=orders,
            withdrawing=Withdrawing(facts, orders),
            conversations=conversations,
            conversation_facts=kept,
            layout=layout,
            forking=forking,
            deleting=deleting,
            retention=retention,
            conversation_sweeps=ConversationSweeps(
                deleting,
                conversations,
                kept,
                turns,
                follower,
                layout,
                kafka.names,
                threads,
                retention,
                every_s=settings.gateway.sweep_conversations_s,
                per_minute=settings.gateway.expired_per_minute,
            ),
            feeds=feeds,
            redriving=Redriving(letters, submitting, view, transport, codec, kafka, threads),
            dependencies=dependencies,
            transactions=transactions,
            sweeps=ArtifactSweeps(Sweeper(artifacts), view, layout, threads, settings.gateway.sweep_artifacts_s),
            threads=threads,
        )
