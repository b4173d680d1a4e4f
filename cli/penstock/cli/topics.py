"""`penstock topics`: create them, list them, check that they are what the invariants need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import instances
from penstock.cli.acls import acls, configured_installation
from penstock.cli.config import (
    USUAL_PARTITIONS,
    ClusterSettings,
    ConfigFile,
    QueueSettings,
    TopicsSection,
    load,
    use_config,
)
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.cli.paths import Progress, silent
from penstock.cli.reaching import require_kafka
from penstock.cli.topic_plan import Change, changes, keeps_long_enough, reassignment
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import Forbidden
from penstock.schemas.topics import TopicNames, TopicSpec, topic_specs

if TYPE_CHECKING:
    from penstock.common.admin import TopicReport

app = App(no_args_is_help=True, help="Create, list and check the topics of Penstock.")

# Kafka allows 249; the longest of ours is a conversation's: `conversations.{63}.{128}`.
MAX_PREFIX = 40

ALTER = "run `penstock topics create --alter`"
FLUSH_GROUPS = (
    "have a person who may do it run `kafka-configs.sh --alter --topic __consumer_offsets"
    " --add-config flush.messages=1`"
)
CURES = {"partitions": "make the topic anew", "replication": "raise it with kafka-reassign-partitions.sh"}


@dataclass
class Cluster:
    """Which Kafka a command is about."""

    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers",
            "-b",
            help="Kafka (default: [kafka], else that of the running `penstock up`, else 127.0.0.1:9092).",
        ),
    ] = None
    topic_prefix: Annotated[
        str | None, typer.Option("--topic-prefix", help="Prefix of the names (default: [kafka], else none).")
    ] = None
    config: ConfigFile = None

    @property
    def is_given(self) -> bool:
        return self != Cluster()

    def load(self) -> tuple[ClusterSettings, KafkaSettings]:
        """The settings, and the cluster, which answers. Raises CliFailure."""
        use_config(self.config)
        settings = load(ClusterSettings)
        return settings, require_kafka(kafka_settings(settings, self.bootstrap_servers, self.topic_prefix))


app.command()(acls)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def create(
    cluster: Cluster,
    partitions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Partitions of each request and result topic (default: [topics], else as those that exist, else 64).",
        ),
    ] = None,
    durability: Annotated[str | None, typer.Option(help="replicas, or fsync against power loss.")] = None,
    conversation_layout: Annotated[
        str | None,
        typer.Option(
            help="topics: a topic for each conversation; sharded: one for all (default: [topics], else topics)."
        ),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="Also the request topics of this pool; may be repeated.")
    ] = None,
    alter: Annotated[
        bool, typer.Option("--alter", help="Set what the invariants and --durability need on topics that exist.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create what is missing and say what differs. Without --alter nothing that exists is changed.

    Missing topics of [[queues]] are created too; existing ones are never changed.

    Examples:

      penstock topics create --bootstrap-servers kafka:9092 --partitions 64

      penstock topics create --durability fsync --alter

      penstock topics create --conversation-layout sharded
    """
    from penstock.cli.audited import audited

    settings, kafka = cluster.load()
    asked = {"partitions": partitions, "durability": durability, "pool": pool, "alter": alter}
    with audited(kafka, "penstock topics create", asked):
        reports = create_topics(
            kafka,
            partitions=partitions or settings.topics.named("partitions"),
            durability=durability or settings.topics.durability,
            conversation_layout=conversation_layout or settings.topics.named("conversation_layout"),
            pools=pool or settings.topics.pools,
            queues=load(QueueSettings).topics,
            config=settings.topics.config,
            alter=alter,
            progress=_tell,
        )
    if alter and (durability or settings.topics.durability) == "fsync":
        _flush_conversations(kafka)
    if as_json:
        typer.echo(json.dumps([_as_dict(report) for report in reports]))
    else:
        _show(reports)


@app.command("list")
def list_topics(
    cluster: Cluster,
    conversations: Annotated[bool, typer.Option(help="Conversation topics too; there may be thousands.")] = False,
    as_json: AsJson = False,
) -> None:
    """List Penstock's topics with their partitions. Conversations that share a topic are not counted.

    Example:  penstock topics list --conversations --json
    """
    from penstock.common.admin import partition_counts

    _, settings = cluster.load()
    names = settings.names
    counts = partition_counts(settings)
    talks = {topic for topic in counts if names.parse_conversation(topic) is not None}
    ours = {topic for topic in counts if topic.startswith(f"{names.prefix}inference.")}
    shown = {topic: counts[topic] for topic in sorted(ours | (talks if conversations else set[str]()))}
    sharded = names.conversation_log in counts  # counting those that share a topic would mean to read it
    if as_json:
        layout = "sharded" if sharded else "topics"
        found = {"topics": shown, "conversations": None if sharded else len(talks), "conversation_layout": layout}
        typer.echo(json.dumps(found))
        return
    for topic, count in shown.items():
        typer.echo(f"{topic:<48} {count:>4} partition{'s' if count > 1 else ''}")
    told = f"conversations share {names.conversation_log}" if sharded else f"{len(talks)} conversations"
    typer.echo(f"{len(shown)} topics; {told}")


@app.command()
def check(cluster: Cluster, as_json: AsJson = False) -> None:
    """Say whether the topics are there and what the invariants need; 1 when not.

    Example:  penstock topics check --bootstrap-servers kafka:9092
    """
    settings, kafka = cluster.load()
    queues = load(QueueSettings).topics
    problems = [*findings(kafka, settings.topics), *missing_queue_topics(kafka, queues)]
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "problems": problems}))
    else:
        for problem in problems:
            typer.echo(problem)
        if not problems:
            typer.echo("all topics are there, as the invariants need them")
    raise typer.Exit(int(ExitCode.FAILED) if problems else 0)


Partitions = Annotated[
    int | None, typer.Option(min=1, help="Partitions of request topics (default: [topics], else as they are).")
]


@app.command()
def plan(cluster: Cluster, partitions: Partitions = None, as_json: AsJson = False) -> None:
    """Print how the topics differ from the settings, and what `apply` would do. Changes nothing.

    Each line says create, change, keep (breaks nothing and stays), refuse (with the reason) or by_hand. Request topics
    get more partitions only while nothing runs and no request waits, because turns of a conversation could run out of
    order otherwise. Topics of results keep theirs. Replicas are added by kafka-reassign-partitions.sh; --json has its
    input. Ends with 1 if something is refused or left to do by hand.

    Example:  penstock topics plan --partitions 128
    """
    from penstock.common.admin import topic_replicas

    settings, kafka = cluster.load()
    found = _planned(settings, kafka, partitions)
    by_hand = sorted({one.topic for one in found.changes if one.state == "by_hand"})
    if as_json:
        held, brokers = topic_replicas(kafka, by_hand) if by_hand else ({}, [])
        moves = reassignment(held, brokers, found.replication) if by_hand else None
        typer.echo(json.dumps({"changes": [asdict(one) for one in found.changes], "reassignment": moves}))
    else:
        _show_changes(found.changes)
    raise typer.Exit(int(ExitCode.FAILED) if found.is_left else 0)


@app.command()
def apply(cluster: Cluster, partitions: Partitions = None, as_json: AsJson = False) -> None:
    """Carry out what `plan` prints as create and change; a call that was killed is completed by the next one.

    Missing topics and settings are mended while the system runs. Ends with 1 if something was refused.

    Examples:

      penstock topics apply

      penstock topics apply --partitions 128
    """
    from penstock.cli.audited import audited
    from penstock.cli.topic_changes import carry_out

    settings, kafka = cluster.load()
    found = _planned(settings, kafka, partitions)
    with audited(kafka, "penstock topics apply", {"partitions": partitions}):
        made = carry_out(kafka, found.changes, found.missing, _tell, found.busy)
    left = [one for one in found.changes if one.state in ("refuse", "by_hand")]
    if as_json:
        typer.echo(json.dumps({"made": made, "left": [asdict(one) for one in left]}))
    else:
        _show_changes(left)
        typer.echo(f"{made} changes made, {len(left)} left")
    raise typer.Exit(int(ExitCode.FAILED) if left else 0)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    missing: list[TopicSpec]
    changes: list[Change]
    replication: int
    busy: Callable[[], str | None]
    """What forbids more partitions of request topics now."""

    @property
    def is_left(self) -> bool:
        return any(one.state in ("refuse", "by_hand") for one in self.changes)


def _planned(settings: ClusterSettings, kafka: KafkaSettings, partitions: int | None) -> _Plan:
    """Raises CliFailure, BrokerUnavailable, Forbidden."""
    from penstock.cli.topic_changes import why_busy
    from penstock.common.admin import broker_count, look_at_topics, settled_counts
    from penstock.schemas.registry import reading_codec

    section, names = settings.topics, kafka.names
    if (hidden := hidden_topics(kafka)) is not None:
        raise Forbidden(f"{hidden}; `penstock topics acls --role operator` prints the rights to grant")
    counts = settled_counts(kafka)
    shared = _is_sharded(names, counts, section.named("conversation_layout") or "topics")
    asked = partitions or section.named("partitions")
    turns = [
        counts[topic] for pool in (None, *section.pools) for topic in names.conversation_topics(pool) if topic in counts
    ]
    # Without a wish, those that must be equal become as the largest.
    count = asked or max(turns, default=USUAL_PARTITIONS)
    brokers = broker_count(kafka)
    specs = _specs(
        names,
        section.pools,
        shared,
        partitions=count,
        brokers=brokers,
        durability=section.durability,
        config=section.config,
    )
    missing, reports = look_at_topics(kafka, specs)
    if asked is None:  # nobody asked for other partitions of those that turns do not come on
        turn_topics = {topic for pool in (None, *section.pools) for topic in names.conversation_topics(pool)}
        reports = [one if one.name in turn_topics else _without_partitions(one, specs) for one in reports]
    more = any("partitions" in one.drift and names.is_request_topic(one.name) for one in reports)
    codec = reading_codec(settings.schema_registry.access)
    busy = partial(why_busy, kafka, configured_installation().groups.get("worker"), codec)
    chosen = {names.prefix + name: values for name, values in section.config.items()}
    return _Plan(
        missing=missing,
        changes=changes(missing, reports, specs, names, chosen=chosen, busy=busy() if more else None),
        busy=busy,
        replication=specs[0].replication,
    )


def _without_partitions(report: TopicReport, specs: Sequence[TopicSpec]) -> TopicReport:
    if any(spec.name == report.name and spec.partitions == 1 for spec in specs):
        return report
    return replace(report, drift={name: one for name, one in report.drift.items() if name != "partitions"})


def _show_changes(found: Sequence[Change]) -> None:
    for one in found:
        reason = "" if one.reason is None else f": {one.reason}"
        typer.echo(f"{one.state:<8} {one.topic} {one.setting} {one.found} -> {one.wanted}{reason}")
    if not found:
        typer.echo("nothing differs from the settings")


@app.command()
def reconcile(
    cluster: Cluster,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """After topics were restored from a backup or a mirror: let workers begin with what has no outcome.

    Run it after `penstock topics create --alter` and before the first worker starts; gateways and producers must not
    run meanwhile. It reads the result, status and request topics. Requests that have an outcome do not run again. The
    generation of the workers' group is raised above all epochs in the topics, so that readers follow what workers
    publish. Where readers follow an origin that the mirror has changed, the unfinished requests of that partition are
    appended again under it. Titles, metadata and policies of conversations are written again if they name topics of
    another cluster, and webhooks that wait if their outcome is at another place. A second call does no harm. It also
    lets streams end that stand still after a loss of power or after the group was deleted.

    Examples:

      penstock topics reconcile --dry-run

      penstock topics reconcile --bootstrap-servers kafka:9092
    """
    from penstock.cli.audited import audited
    from penstock.cli.restored.reconcile import reconcile_topics
    from penstock.schemas.registry import reading_codec

    settings, kafka = cluster.load()
    with nullcontext() if dry_run else audited(kafka, "penstock topics reconcile", {}):
        found = reconcile_topics(kafka, reading_codec(settings.schema_registry.access), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps(found))
        return
    will = "would be" if dry_run else "were"
    typer.echo(f"{found['presumed_ended']} requests count as ended: they have no outcome, and expired before")
    typer.echo(f"{found['unfinished']} requests have no outcome: they run when workers start")
    typer.echo(f"{found['appended_again']} of them {will} appended again under the origin that readers follow")
    typer.echo(f"the facts of {found['conversation_facts']} conversations {will} written again")
    typer.echo(f"{found['usage_totals']} totals of usage {will} written again")
    typer.echo(f"{found['webhooks']} webhooks that wait {will} written again, with the places of their outcomes")
    if not dry_run:
        typer.echo(f"the group {found['group']} is at generation {found['generation']}: start the workers")


def kafka_settings(settings: ClusterSettings, bootstrap_servers: str | None, prefix: str | None) -> KafkaSettings:
    """The cluster of the options, else of the settings, else of the `penstock up` that runs here.

    Raises CliFailure for a prefix Kafka refuses.
    """
    chosen = settings.kafka.topic_prefix if prefix is None else prefix
    if not re.fullmatch(rf"[a-zA-Z0-9._-]{{0,{MAX_PREFIX}}}", chosen):
        raise CliFailure(
            f"kafka.topic_prefix {chosen!r}: use at most {MAX_PREFIX} letters, digits, dots, underscores and dashes",
            exit_code=ExitCode.USAGE,
        )
    if bootstrap_servers is None and "bootstrap_servers" not in settings.kafka.model_fields_set:
        running = instances.found()
        bootstrap_servers = None if running is None else running.bootstrap_servers
    return settings.kafka_settings(bootstrap_servers, chosen)


def create_topics(
    settings: KafkaSettings,
    *,
    partitions: int | None,
    usual_partitions: int = USUAL_PARTITIONS,
    durability: str,
    conversation_layout: str | None = None,
    pools: Sequence[str] = (),
    queues: Sequence[str] = (),
    config: Mapping[str, Mapping[str, str]] | None = None,
    alter: bool = False,
    progress: Progress = silent,
) -> list[TopicReport]:
    """Create what is missing; with `alter` also set what an invariant or fsync needs on topics that exist.

    `partitions`: None: as many as the topics have that exist, else `usual_partitions`. `queues`: topics of other
    systems, of which nothing is changed.

    Raises CliFailure when what is there then breaks an invariant; Forbidden, BrokerUnavailable.
    """
    from penstock.common.admin import broker_count, ensure_topics, partition_counts

    if durability not in ("replicas", "fsync"):
        raise CliFailure(f"durability {durability!r}: use replicas or fsync", exit_code=ExitCode.USAGE)
    brokers = broker_count(settings)
    existing = partition_counts(settings)
    shared = _is_sharded(settings.names, existing, conversation_layout or "topics")
    if shared and conversation_layout == "topics":
        progress(f"conversations share {settings.names.conversation_log} already: the layout topics does not hold")
    count = partitions or existing.get(settings.names.result, usual_partitions)
    specs = _specs(
        settings.names, pools, shared, partitions=count, brokers=brokers, durability=durability, config=config or {}
    )
    planned = {spec.name: spec.partitions for spec in specs} | existing
    if problems := unequal_topics(settings.names, planned, pools):
        raise CliFailure(f"nothing was made: {problems[0]}")
    reports = ensure_topics(settings, [*specs, *_queue_specs(queues, existing, count, brokers)])
    if alter:
        reports = _alter(settings, reports, specs, progress)
    _say_partitions(reports, progress)
    if durability == "fsync":
        _flush_groups(settings, progress, alter=alter)
    created = sum(report.created for report in reports)
    if created:
        progress(f"created {created} topics with {count} partitions")
    # An existing topic of another size is no mistake by itself, but those that turns come on must agree.
    if problems := unequal_topics(settings.names, partition_counts(settings), pools):
        raise CliFailure(problems[0])
    return reports


def _specs(
    names: TopicNames,
    pools: Sequence[str],
    shared: bool,
    *,
    partitions: int,
    brokers: int,
    durability: str,
    config: Mapping[str, Mapping[str, str]],
) -> list[TopicSpec]:
    """The topics of an installation and of these pools. `shared`: with the one of all conversations.

    `config`: `[topics.config]`. Raises CliFailure for a topic that is not among them.
    """
    specs = partial(topic_specs, names, partitions=partitions, brokers=brokers, durability=durability)
    found = [*specs(shared_conversations=shared), *(spec for pool in pools for spec in specs(pool=pool))]
    if unknown := {names.prefix + name for name in config} - {spec.name for spec in found}:
        raise CliFailure(
            f"[topics.config] names {min(unknown)}, which is no topic of Penstock", exit_code=ExitCode.USAGE
        )
    chosen = {names.prefix + name: values for name, values in config.items()}
    return [replace(spec, config={**spec.config, **chosen.get(spec.name, {})}) for spec in found]


def _queue_specs(queues: Sequence[str], existing: Container[str], partitions: int, brokers: int) -> list[TopicSpec]:
    """Those that are missing. The broker's defaults hold for all else: the topics are another system's."""
    replication = 3 if brokers >= 3 else 1
    return [
        TopicSpec(name=name, partitions=partitions, replication=replication) for name in queues if name not in existing
    ]


def _say_partitions(reports: Sequence[TopicReport], progress: Progress) -> None:
    """The setting does not hold for topics that exist: Kafka changes their partitions only where a person asks it."""
    differing = [report.drift["partitions"] for report in reports if "partitions" in report.drift]
    if differing:
        wanted, found = differing[0]
        progress(
            f"{len(differing)} topics exist with other partitions ({found}) than asked for ({wanted}) and keep them:"
            f" raise them with `kafka-topics.sh --alter --partitions {wanted}` while no worker runs"
        )


def _is_sharded(names: TopicNames, existing: Mapping[str, int], layout: str) -> bool:
    """Whether conversations share a topic: they do already, or nothing speaks against what is wished."""
    if layout not in ("topics", "sharded"):
        raise CliFailure(f"conversation layout {layout!r}: use topics or sharded", exit_code=ExitCode.USAGE)
    if names.conversation_log in existing or layout == "topics":
        return names.conversation_log in existing
    if talks := sum(names.parse_conversation(topic) is not None for topic in existing):
        raise CliFailure(
            f"nothing was made: {talks} conversations have topics of their own, and would not be found any more; export"
            " them with `penstock conversations export`, delete them, and import them afterwards"
        )
    return True


def _alter(
    settings: KafkaSettings, reports: Sequence[TopicReport], specs: Sequence[TopicSpec], progress: Progress
) -> list[TopicReport]:
    """Set what has to be; the reports of what is so then. Raises CliFailure for what did not become so."""
    from penstock.common.admin import ensure_topics
    from penstock.common.altering import alter_topics

    wanted = to_alter(reports, specs)
    if not wanted:
        return list(reports)
    altered = alter_topics(settings, wanted)
    progress(f"altered settings of {len(altered)} topics")
    created = {report.name for report in reports if report.created}
    after = [
        replace(report, created=report.name in created, altered=report.name in altered)
        for report in ensure_topics(settings, specs)
    ]
    if left := to_alter(after, specs):
        raise CliFailure(f"the brokers did not take these settings: {json.dumps(left)}")
    return after


def _flush_groups(settings: KafkaSettings, progress: Progress, *, alter: bool) -> None:
    """A group whose generation begins again after a loss of power is not heard by readers. Shared by all teams."""
    from penstock.common.altering import flush_groups, flushes_groups

    if alter:
        try:
            flush_groups(settings)
        except Forbidden as error:
            progress(f"{error}: {FLUSH_GROUPS}")
    elif not flushes_groups(settings):
        progress(f"the brokers do not flush what they know of groups: {ALTER}")


def _flush_conversations(settings: KafkaSettings) -> None:
    from penstock.common.altering import flush_conversations

    if flushed := flush_conversations(settings):
        _tell(f"altered settings of {flushed} conversations")


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def missing_queue_topics(settings: KafkaSettings, queues: Sequence[str]) -> list[str]:
    """A line for each topic of `[[queues]]` that is missing. Raises BrokerUnavailable."""
    from penstock.common.admin import partition_counts

    there = partition_counts(settings, queues) if queues else {}
    return [
        f"{name} of [[queues]] does not exist: run `penstock topics create`" for name in queues if name not in there
    ]


def findings(settings: KafkaSettings, topics: TopicsSection) -> list[str]:
    """What is missing or breaks an invariant, one line each. Raises BrokerUnavailable."""
    from penstock.common.admin import broker_count, look_at_topics, settled_counts

    if (hidden := hidden_topics(settings)) is not None:
        return [hidden]
    counts = settled_counts(settings)
    shared = settings.names.conversation_log in counts
    brokers, durability = broker_count(settings), topics.durability
    specs = _specs(
        settings.names, topics.pools, shared, partitions=4, brokers=brokers, durability=durability, config=topics.config
    )
    missing, reports = look_at_topics(settings, specs)
    absent = [f"{spec.name} does not exist: run `penstock topics create`" for spec in missing]
    return [*absent, *broken(reports, specs), *unequal_topics(settings.names, counts, topics.pools)]


def hidden_topics(settings: KafkaSettings) -> str | None:
    """A line if topics may not be described: to this client they look as if they did not exist."""
    from penstock.common.admin import topic_operations

    topics = [spec.name for spec in topic_specs(settings.names)]
    hidden = sorted(name for name, allowed in topic_operations(settings, topics).items() if not allowed)
    if not hidden:
        return None
    return f"no DESCRIBE on {len(hidden)} of {len(topics)} topics ({hidden[0]}, …): whether they exist is not known"


def broken(reports: Sequence[TopicReport], specs: Sequence[TopicSpec]) -> list[str]:
    """Drift that breaks an invariant, as lines. Pure."""
    return [
        f"{report.name}: {setting} is {found} and must be {wanted}: {CURES.get(setting, ALTER)}"
        for report, setting, wanted, found in _breaking(reports, specs)
    ]


def to_alter(reports: Sequence[TopicReport], specs: Sequence[TopicSpec]) -> dict[str, dict[str, str]]:
    """Of each topic the settings that break an invariant and that an alteration mends. Pure."""
    settings: dict[str, dict[str, str]] = {}
    for report, setting, wanted, _ in _breaking(reports, specs):
        # More in-sync replicas than a topic has replicas would refuse every write.
        if setting not in CURES and not (setting == "min.insync.replicas" and "replication" in report.drift):
            settings.setdefault(report.name, {})[setting] = wanted
    return settings


def _breaking(
    reports: Sequence[TopicReport], specs: Sequence[TopicSpec]
) -> Iterator[tuple[TopicReport, str, str, str]]:
    """Each drift that breaks an invariant; more partitions or a longer retention than ours break nothing."""
    single = {spec.name for spec in specs if spec.partitions == 1}
    for report in reports:
        for setting, (wanted, found) in report.drift.items():
            if setting == "partitions" and (report.name not in single or found == wanted):
                continue
            if setting == "retention.ms" and keeps_long_enough(found):
                continue
            if setting in ("replication", "min.insync.replicas") and int(found) > int(wanted):
                continue
            yield report, setting, wanted, found


def unequal_topics(names: TopicNames, counts: Mapping[str, int], pools: Sequence[str] = ()) -> list[str]:
    """The topics of text and of images of a pool must have equal partitions, or a conversation's turns do not meet."""
    lines: list[str] = []
    for pool in (None, *pools):
        topics = names.conversation_topics(pool)
        found = [counts[topic] for topic in topics if topic in counts]
        if len(set(found)) > 1:
            sizes = ", ".join(f"{topic} {count}" for topic, count in zip(topics, found, strict=False))
            lines.append(
                f"the topics of text and of images differ in partitions ({sizes}) and must be equal:"
                f" raise the smaller ones with `kafka-topics.sh --alter --partitions {max(found)}` while no worker runs"
            )
    return lines


def _show(reports: Sequence[TopicReport]) -> None:
    for report in reports:
        typer.echo(f"{_state(report):<8} {report.name}")
        for setting, (wanted, found) in report.drift.items():
            typer.echo(f"{'':<8}   {setting} is {found}, Penstock would set {wanted}")
    created = sum(report.created for report in reports)
    drifted = sum(bool(report.drift) for report in reports)
    typer.echo(
        f"{created} created, {len(reports) - created} there already" + (f", {drifted} differ" if drifted else "")
    )


def _state(report: TopicReport) -> str:
    if report.created:
        return "created"
    return "altered" if report.altered else "differs" if report.drift else "there"


def _as_dict(report: TopicReport) -> dict[str, object]:
    drift = {name: {"is": found, "should_be": wanted} for name, (wanted, found) in report.drift.items()}
    return {"name": report.name, "state": _state(report), "drift": drift}
