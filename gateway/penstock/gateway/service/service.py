"""The gateway's service: what routes and sockets call, parted by subject. No HTTP in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweeping import Sweeper
from penstock.gateway.conversations.layout import Layout
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
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


class GatewayService:
    """Made when the gateway is connected to its Kafka."""

    def __init__(
        self,
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
    ) -> None:
        conf, kafka = settings.gateway, settings.kafka_settings()
        names = kafka.names
        self.settings, self.kafka, self.artifacts, self.threads = settings, kafka, artifacts, threads
        self.conversations, self.layout = conversations, layout
        self.transactions = OpenTransactions(kafka, view, threads)
        self.facts = facts = Facts(view, follower, hub, conf.worker_late_s, run_times, self.transactions)
        self.turns = turns = Turns(view, threads)
        self.lookups = lookups = Lookups(view, follower, hub, threads, outcomes, turns)
        self.deliveries = DeliveryLookups(lookups, outcomes, kafka, codec, threads)
        self.records = RequestRecords(outcomes, codec, threads)
        self.subscriptions = Subscriptions(view, follower, hub, names, turns, facts.waits_unseen)
        self.model_orders = orders = ModelOrders(transport, facts, kafka, codec, threads, view.fleet.follow)
        self.control = Control(transport, view, follower, lookups, codec, names, artifacts, allowances, threads, turns)
        self.bulk_commands = BulkCommands(self.control, view, lookups, allowances)
        self.ending_lost = EndingLost(view, follower, facts, self.control, kafka, threads)
        self.withdrawing = Withdrawing(facts, orders)
        self.submitting = Submitter(
            settings, transport, view, follower, codec, allowances, facts, artifacts.check_place
        )
        self.conversation_facts = FactsOfConversations(transport, view, follower, layout, kafka, codec, threads)
        self.forking = Forking(transport, layout, conversations, names, codec, artifacts, threads)
        self.feeds = Feeds(conversations, hub, threads)
        self.retention = retention_of(conf.limits)
        self.deleting = Deleting(
            self.control,
            self.conversation_facts,
            self.forking,
            conversations,
            self.feeds,
            allowances,
            threads,
            self.retention,
        )
        self.conversation_sweeps = ConversationSweeps(
            self.deleting,
            conversations,
            self.conversation_facts,
            turns,
            follower,
            layout,
            names,
            threads,
            self.retention,
            every_s=conf.sweep_conversations_s,
            per_minute=conf.expired_per_minute,
        )
        self.redriving = Redriving(letters, self.submitting, view, transport, codec, kafka, threads)
        probes = {
            "artifacts": artifact_probe(artifacts, threads),
            "orders": orders_probe(orders),
            "rights": rights_probe(transport, kafka),
        }
        self.dependencies = Dependencies(probes, conf.probe_s)
        transport.on_refused = partial(self.dependencies.probe_now, "rights")
        self.sweeps = ArtifactSweeps(Sweeper(artifacts), view, layout, threads, conf.sweep_artifacts_s)

    async def stored(self, tenant: str, work: Callable[[ArtifactStore], T]) -> T:
        """What the artifact store does for a tenant, on one of its threads. Raises what `work` raises."""
        return await self.threads.artifacts.run_for(tenant, work, self.artifacts)

    async def erase(self, caller: Caller, request_id: str) -> None:
        """Erase a request that has ended, with its dead letters. Raises as `Control.erase`."""
        if (await self.lookups.find(caller.tenant, request_id)).done:  # its webhook may have one, however it ended
            await self.redriving.forget(caller, request_id)
        await self.control.erase(caller.tenant, request_id)
