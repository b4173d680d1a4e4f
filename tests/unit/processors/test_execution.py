"""Execution: every effect on engines and conversations, and every way in which it can end, before a real flow."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flow_driver import World
from kit.worker_turns import MemoryLog, picture, turns_of
from penstock.common.artifacts import Artifact, ArtifactStore
from penstock.common.configuration import ArtifactsSection
from penstock.processors import execution
from penstock.processors.conversations.held import HeldImages
from penstock.processors.conversations.turns import LostOwnership
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.processors.engines.base import EngineGone, Preview, RunSpec
from penstock.processors.execution import Execution
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.kafka.outcomes import usage_of
from penstock.processors.metrics import Metrics
from penstock.processors.outputs import INLINE_BYTES, PREVIEW_KEPT_S, Outputs, reference_to, size_of
from penstock.processors.spool import Spool
from penstock.schemas.errors import (
    BrokerUnavailable,
    Conflict,
    EngineFailed,
    Expired,
    InvalidRequest,
    Overloaded,
    PenstockError,
    StoreUnavailable,
    conversation_deleted,
)
from penstock.schemas.records import ArtifactRef
from penstock.schemas.records import Preview as KeptPreview
from shell_fakes import MARK, ScriptedEngine, ScriptedTurns, answer_of
from support import wait_until_async

LARGE = "x" * (INLINE_BYTES + 1)
EDIT = {"prompt": "p", "image": {"artifact_id": "a"}, "mask": {"url": "https://x/m.png"}, "width": None}
DRAWING: dict[str, Any] = {"task": "image_generation", "payload": {"prompt": "a cat"}, "conversation": "c"}
MADE = {"media_type": "image/png", "width": 4, "height": 2, "seed": 7}
SUMMING: dict[str, Any] = {"task": "summarization", "conversation_id": "c", "payload": {"through_offset": 7}}
SUMMARY = replace(answer_of("r", "short"), direction="summary", role="system", covers_through=7, finish_reason=None)


class Shell(World):
    """A flow whose engine and conversations are carried out by a real `Execution`."""

    def __init__(
        self, artifacts: Path, *, turns: Any = None, outputs: Outputs | None = None, spool_bytes: int = 10 << 20
    ) -> None:
        self.engine: Any = ScriptedEngine()
        self.turns: Any = turns or ScriptedTurns()
        self.metrics = Metrics()
        self.terminals: dict[str, ask.Terminal] = {}
        self.defaults: dict[str, Any] = {}
        self.fetched: list[tuple[str, Mapping[str, Any], str]] = []
        self.fetch_error: PenstockError | None = None
        self.shown: list[KeptPreview] = []
        self._settling = False
        self.spool = Spool(artifacts.parent, spool_bytes)
        super().__init__()
        self.execution = Execution(
            self.flow,
            lambda model, replica: self.engine,
            self.turns,
            outputs or Outputs(artifacts),
            self.spool,
            self.metrics,
            clock=lambda: self.now,
            changed=self.settle,
            defaults=lambda lane: self.defaults,
            images=self,
        )

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        """Each image is red."""
        self.fetched.append((tenant, ref, param))
        if self.fetch_error is not None:
            raise self.fetch_error
        return DecodedImage(1, 1, "RGB", b"\xff\0\0", "PNG", "0" * 64)

    async def kept(self, tenant: str, request_id: str, ref: Mapping[str, Any], *, param: str) -> ArtifactRef:
        return picture(ref["artifact_id"])

    def close(self) -> None:
        pass

    def settle(self) -> None:
        if self._settling:  # an answer within an effect: the loop below goes on with it
            return
        self._settling = True
        try:
            super().settle()
        finally:
            self._settling = False

    def answer(self, effect: Any) -> None:
        match effect:
            case ask.Prepare():
                self.execution.prepare(effect)
            case ask.Begin():
                self.execution.begin(effect)
            case ask.Start():
                self.started.append(effect.subject.request_id)
                self.execution.start(effect)
            case ask.CancelRun(model, replica, run_id):
                self.execution.cancel(model, replica, run_id)
            case ask.StoreOutput():
                self.execution.keep(effect)
            case ask.ShowPreview():
                self.execution.show_preview(effect, lambda _, preview: self.shown.append(preview))
            case ask.CheckForAnswer():
                self.execution.look_up(effect)
            case ask.Terminal(work):
                self.terminals[work.request_id] = effect
                super().answer(effect)
            case _:
                super().answer(effect)

    async def until(self, condition: Callable[[], Any]) -> None:
        await wait_until_async(condition, describe=lambda: list(self.flow.works.values()))

    async def until_running(self) -> RunSpec:
        """What the engine's first run was asked to do."""
        await self.until(lambda: self.engine.runs)
        return next(iter(self.engine.runs.values()))[0]

    async def until_ended(self, request_id: str = "r") -> ask.Terminal:
        await self.until(lambda: request_id in self.terminals)
        return self.terminals[request_id]

    async def begin(self, request_id: str = "r", **fields: Any) -> RunSpec:
        """A request from its arrival to its run."""
        self.submit(request_id, **fields)
        return await self.until_running()

    async def run(self, output: dict[str, Any] | None = None, **fields: Any) -> ask.Terminal:
        """A request `r` from its arrival to its outcome, with this output of the engine."""
        await self.begin(**fields)
        self.engine.finish_with(output or {"text": "done"})
        return await self.until_ended()

    def cancel_queued(self, **fields: Any) -> None:
        """A request of a model that is not loaded, cancelled."""
        self.flow.replicas.gone("m", 0, self.now)
        self.submit("r", **fields)
        self.cancel("r")

    async def until_idle(self) -> None:
        """Everything that was asked has been answered."""
        await self.until(lambda: not self.execution._tasks)  # pyright: ignore[reportPrivateUsage]

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def work(self, request_id: str = "r") -> Work:
        return next(work for work in self.flow.works.values() if work.request_id == request_id)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Shell]]:
    made: list[Shell] = []

    def make(**parts: Any) -> Shell:
        made.append(Shell(tmp_path / "artifacts", **parts))
        made[-1].up(slots=4)
        return made[-1]

    yield make
    for shell in made:
        await shell.execution.close()


@pytest.fixture
async def shell(make: Callable[..., Shell]) -> Shell:
    return make()


# -- one request


async def test_a_request_is_prepared_run_and_ended(shell: Shell) -> None:
    shell.engine.memory_bytes = 7
    await shell.begin(stream=True)
    spec, prepared, _ = shell.engine.only_run()
    assert (spec.task, spec.model, spec.prompt) == ("text_generation", "m", "r")
    assert (spec.messages, spec.history) == (None, None)
    assert prepared.prompt_tokens == 3
    assert shell.work().memory_bytes == 7, "the engine names the memory of a run"
    shell.engine.say("he")
    shell.engine.say("llo")
    shell.engine.finish("hello")
    terminal = await shell.until_ended()
    assert (terminal.status, terminal.finished.output) == ("completed", {"text": "hello"})
    assert [chunk.text for chunk in shell.chunks] == ["he", "llo"]
    assert shell.metric("penstock_first_token_seconds_count", model="m") == 1, "only the first is timed"
    assert shell.metric("penstock_tokens_total", kind="prompt") == 3
    assert shell.metric("penstock_tokens_total", kind="completion") == 2
    assert shell.turns.mine == [], "without a conversation none is read"


async def test_defaults_of_the_model_stand_in_for_what_a_request_leaves_out(shell: Shell) -> None:
    shell.defaults = {"max_tokens": 7, "temperature": 0.0, "stop": ["END"], "dimensions": 3}
    spec = await shell.begin(payload={"prompt": "r", "temperature": 0.9, "stop": None})
    assert spec.params == {"max_tokens": 7, "temperature": 0.9, "stop": ["END"]}, "of its task, and never over its own"
    assert spec.defaulted == {"max_tokens", "stop"}


async def test_the_prepared_need_is_what_the_grant_takes(shell: Shell) -> None:
    shell.up(slots=4, tokens=100)
    shell.engine.need_tokens = 80
    shell.submit("a")
    await shell.begin("b")
    await shell.until_idle()
    assert shell.started == ["a"], "two do not fit"
    shell.engine.finish()
    await shell.until(lambda: shell.started == ["a", "b"])


async def test_attempts_have_run_ids_of_their_own(shell: Shell) -> None:
    await shell.begin()
    shell.engine.fail(Overloaded("busy"), again=True)
    assert shell.work().stage is Stage.RETRYING
    shell.pass_time(1.0)
    await shell.until_running()
    shell.engine.finish()
    assert (await shell.until_ended()).status == "completed"
    first, second = (spec.run_id for spec in shell.engine.prepared)
    assert first != second


# -- failures


@pytest.mark.parametrize(
    ("step", "error", "code"),
    [
        ("check", InvalidRequest("output.store 'warm' is no configured store"), "invalid"),
        ("fetch", InvalidRequest("it is no image", param="payload.image"), "invalid"),
        ("prepare", InvalidRequest("too long"), "invalid"),
        ("prepare", ZeroDivisionError("secret"), "internal"),
        ("start", InvalidRequest("no"), "invalid"),
        ("start", RuntimeError("secret"), "internal"),
        ("run", EngineFailed("out of memory"), "engine_failed"),
        ("begin", PenstockError("full"), "internal"),
        ("begin", OSError("secret"), "internal"),
        ("keep", PenstockError("cannot be kept"), "internal"),
        ("keep", OSError("secret"), "internal"),
    ],
)
async def test_an_error_in_any_step_fails_the_request(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, step: str, error: Any, code: str
) -> None:
    """Messages of foreign errors are not published: they can hold anything."""
    fields: dict[str, Any] = {"conversation": "c"} if step in ("begin", "keep") else {}
    match step:
        case "check":
            monkeypatch.setattr(Outputs, "check", Mock(side_effect=error))
        case "fetch":
            shell.fetch_error, fields = error, {"task": "image_editing", "payload": EDIT}
        case "prepare":
            shell.engine.refusal = error
        case "start":
            shell.engine.run_error = error
        case "begin":
            shell.turns.agrees = [error]
        case _:
            shell.turns.winner = error
    shell.submit("r", **fields)
    if step in ("run", "keep"):
        await shell.until_running()
        shell.engine.finish() if step == "keep" else shell.engine.fail(error, again=False)
    terminal = await shell.until_ended()
    assert (terminal.status, terminal.error.code) == ("failed", code)
    assert terminal.error.message == error.message if code == "invalid" else "secret" not in terminal.error.message
    assert shell.started == (["r"] if step in ("start", "run", "keep") else [])
    assert shell.flow.running == 0, "its slot is free again"


# -- preparing


async def test_a_refusal_that_passes_is_tried_again(shell: Shell) -> None:
    shell.engine.refusal = Overloaded("later")
    shell.submit("r")
    await shell.until(lambda: shell.work().stage is Stage.RETRYING)
    shell.engine.refusal = None
    shell.pass_time(1.0)
    await shell.until_running()


@pytest.mark.parametrize(
    ("gone", "stages", "started"),
    [
        ("before it prepares", {Stage.PREPARING}, []),
        ("while it prepares", {Stage.PREPARING}, []),
        ("at the grant", {Stage.QUEUED, Stage.PREPARING, Stage.READY}, ["r"]),
    ],
)
async def test_an_engine_that_goes_costs_no_attempt(
    shell: Shell, gone: str, stages: set[Stage], started: list[str]
) -> None:
    """The flow hears of it from the lane. Until the lane is up again nothing is offered to it."""
    engine = shell.engine
    match gone:
        case "before it prepares":
            shell.engine = None
        case "while it prepares":
            engine.refusal = EngineGone("died")
        case _:
            engine.run_error = EngineGone("died")
    shell.submit("r")
    await shell.until(lambda: engine.prepared or shell.engine is None)
    await shell.until(lambda: shell.started == started)
    await shell.until_idle()
    assert shell.work().stage in stages
    assert shell.started == started
    shell.engine, engine.refusal, engine.run_error = engine, None, None
    shell.flow.replicas.gone("m", 0, shell.now)
    shell.up(slots=4)
    await shell.until_running()
    assert (shell.work().attempt, shell.work().spent) == (1, 1)


async def test_an_answer_for_a_run_that_is_over_changes_nothing(shell: Shell) -> None:
    shell.engine.answers.clear()
    shell.submit("r")
    await shell.until(lambda: shell.engine.prepared)
    shell.cancel("r")
    assert shell.ended == [("r", "cancelled")]
    shell.engine.answers.set()
    await shell.until_idle()
    assert shell.ended == [("r", "cancelled")]
    assert shell.started == []
    assert shell.engine.cancelled == [shell.engine.prepared[0].run_id]


async def test_what_was_overtaken_by_another_run_is_not_prepared_again(shell: Shell) -> None:
    """The engine dies and is back before its work was carried out: the new run is prepared once."""
    shell.submit("r", settle=False)
    shell.flow.step(shell.now)
    (overtaken,) = [effect for effect in shell.flow.take_effects() if isinstance(effect, ask.Prepare)]
    shell.flow.replicas.gone("m", 0, shell.now)
    shell.up(slots=4)
    shell.execution.prepare(overtaken)
    await shell.until_running()
    assert len(shell.engine.prepared) == 1


# -- starting and running


async def test_an_inline_engine_prepares_as_it_starts(shell: Shell) -> None:
    shell.engine = ScriptedEngine(inline=True)
    shell.up(slots=4, inline=True)
    shell.submit("r")
    assert len(shell.engine.runs) == 1, "in the same turn of the loop"
    assert not shell.effects(ask.Prepare)
    shell.engine.finish()
    shell.engine.refusal = InvalidRequest("too long")
    shell.submit("refused")
    shell.engine.refusal = None
    shell.engine.answers.clear()
    shell.submit("waits")
    codes = {request_id: terminal.error and terminal.error.code for request_id, terminal in shell.terminals.items()}
    assert codes == {"r": None, "refused": "invalid", "waits": "internal"}


async def test_a_start_that_was_overtaken_by_a_cancel_never_reaches_the_engine(shell: Shell) -> None:
    shell.hold_answers = {ask.Start}
    shell.submit("r")
    await shell.until(lambda: shell.asked)
    shell.cancel("r")
    shell.release(ask.Start)
    assert shell.engine.runs == {}
    assert shell.ended == [("r", "cancelled")]


async def test_a_cancel_reaches_the_engine_and_late_words_are_not_heard(shell: Shell) -> None:
    await shell.begin(stream=True)
    spec, _, sink = shell.engine.only_run()
    shell.cancel("r")
    assert shell.engine.cancelled == [spec.run_id]
    shell.engine.runs[spec.run_id] = (spec, None, sink)
    shell.engine.say("late")
    shell.engine.finish("late")
    assert shell.ended == [("r", "cancelled")]
    assert shell.chunks == []
    await shell.begin("without an engine")
    shell.engine = None
    shell.cancel("without an engine")
    assert shell.ended[1:] == [("without an engine", "cancelled")]


# -- conversations


async def test_a_turn_is_read_begun_run_and_kept(shell: Shell) -> None:
    spec = await shell.begin(conversation="c")
    assert spec.history.messages == shell.turns.history
    assert shell.turns.begun == [("r", MARK)], "with what was read"
    shell.engine.finish("hello")
    terminal = await shell.until_ended()
    (kept,) = shell.turns.finished
    assert (kept.content, kept.request_id, kept.epoch, kept.attempt, kept.model) == ("hello", "r", 1, 1, "m")
    assert terminal.finished.output == {"text": "hello"}


@pytest.mark.parametrize("kind", ["text", "large text", "summary", "images"])
@pytest.mark.parametrize("found", ["before its run", "after its run", "after a cancel"])
async def test_an_answer_that_stands_is_the_outcome(shell: Shell, tmp_path: Path, kind: str, found: str) -> None:
    """Another attempt has added it, and its worker died before it could publish the outcome."""
    image = ArtifactStore(tmp_path / "artifacts").put(
        "default", b"drawn", media_type="image/png", width=4, height=2, seed=7
    )
    fields, answer, output = {
        "text": ({"conversation": "c"}, answer_of("r", "said before"), {"text": "said before"}),
        "large text": ({"conversation": "c"}, answer_of("r", LARGE), None),
        "summary": (SUMMING, SUMMARY, {"text": "short", "covers_through": 7}),
        "images": (
            DRAWING,
            replace(answer_of("r", ""), artifacts=[reference_to(image)]),
            {"images": [{**image.reference(), "expires_at": None}]},
        ),
    }[kind]
    if found == "after its run":
        shell.turns.winner = answer
        own = {"images": [{**MADE, "data": b"another"}]} if kind == "images" else {"text": "another"}
        terminal = await shell.run({**own, "covers_through": 7} if kind == "summary" else own, **fields)
    else:
        shell.turns.stands = answer
        shell.cancel_queued(**fields) if found == "after a cancel" else shell.submit("r", **fields)
        terminal = await shell.until_ended()
        assert (shell.engine.prepared, shell.turns.begun, shell.turns.finished) == ([], [], []), "it stands already"
    assert terminal.status == "completed"
    if output is None:
        assert terminal.artifact is not None
    else:
        assert terminal.finished.output == output


async def test_a_turn_that_ends_while_its_conversation_is_read_never_reaches_the_engine(shell: Shell) -> None:
    shell.turns.readable.clear()
    shell.submit("r", conversation="c")
    await shell.until(lambda: shell.turns.mine)
    shell.cancel("r")
    shell.turns.readable.set()
    await shell.until_idle()
    assert shell.ended == [("r", "cancelled")]
    assert shell.engine.prepared == []


async def test_a_log_that_moved_is_read_and_prepared_again(shell: Shell) -> None:
    shell.turns.agrees = [False]
    shell.submit("r", conversation="c")
    await shell.until_running()
    assert len(shell.turns.begun) == len(shell.engine.prepared) == 2
    assert shell.work().attempt == 1


@pytest.mark.parametrize("step", ["stands", "agrees", "winner"])
async def test_what_went_to_another_worker_is_not_spoken_of(shell: Shell, step: str) -> None:
    lost = LostOwnership()
    setattr(shell.turns, step, [lost] if step == "agrees" else lost)
    shell.submit("r", conversation="c")
    if step == "winner":
        await shell.until_running()
        shell.engine.finish()
    await shell.until(lambda: shell.turns.mine)
    await shell.until_idle()
    assert shell.ended == []
    shell.assigned(2, ())
    assert not shell.flow.works
    assert shell.ended == []
    assert not shell.turns.mine[-1](), "whoever still waits for it lets go"


@pytest.mark.parametrize(
    ("winner", "attempt", "completion_tokens"),
    [
        pytest.param("another's", 2, 0, id="readers can tell it from the words that were published"),
        pytest.param("hello", 1, 2, id="the same answer is the run's own"),
    ],
)
async def test_the_answer_that_counts_is_the_outcome(
    shell: Shell, winner: str, attempt: int, completion_tokens: int
) -> None:
    shell.turns.winner = answer_of("r", winner)
    await shell.begin(conversation="c", stream=True)
    shell.engine.say("hello")
    shell.engine.finish("hello")
    terminal = await shell.until_ended()
    assert terminal.finished.output == {"text": winner}
    assert terminal.subject.attempt == attempt
    assert terminal.finished.completion_tokens == completion_tokens


async def test_an_answer_whose_conversation_was_deleted_ends_its_turn_as_cancelled(shell: Shell) -> None:
    shell.turns.winner = conversation_deleted()
    terminal = await shell.run(conversation="c")
    assert (terminal.status, str(terminal.error)) == ("cancelled", "its conversation was deleted")


async def test_a_turn_that_is_cancelled_while_it_begins_may_write_nothing_from_then_on(shell: Shell) -> None:
    """Also before the broker has acknowledged its outcome."""
    shell.turns.beginnable.clear()
    shell.hold_answers = {ask.Terminal}
    shell.submit("r", conversation="c")
    await shell.until(lambda: shell.turns.begun)
    assert shell.turns.may_begin()
    shell.cancel("r")
    assert not shell.turns.may_begin()
    shell.turns.beginnable.set()
    shell.release(ask.Terminal)
    await shell.until_idle()
    assert shell.ended == [("r", "cancelled")]


# -- looking for an answer of what ends without a run


@pytest.mark.parametrize(
    ("stands", "ended"),
    [
        pytest.param(None, [("r", "cancelled")], id="no answer stands"),
        pytest.param(LostOwnership(), [], id="it went to another worker"),
    ],
)
async def test_a_look_without_an_answer(shell: Shell, stands: Any, ended: list[tuple[str, str]]) -> None:
    shell.turns.stands = stands
    shell.cancel_queued(conversation="c")
    await shell.until_idle()
    assert shell.ended == ended
    assert ended or shell.work().stage is Stage.CHECKING_FOR_ANSWER


@pytest.mark.parametrize("error", [OSError("lost"), PenstockError("refused"), Expired("the store hangs")])
async def test_an_answer_that_was_appended_before_a_failure_is_the_outcome(shell: Shell, error: Exception) -> None:
    shell.turns.winner = error
    await shell.begin(conversation="c")
    shell.turns.stands = answer_of("r", "appended")
    shell.engine.finish("appended")
    terminal = await shell.until_ended()
    assert (terminal.status, terminal.finished.output) == ("completed", {"text": "appended"})


@pytest.mark.parametrize("error", [OSError("away"), ValueError("a fault"), BrokerUnavailable("away")])
async def test_a_failed_look_is_not_taken_for_no_answer(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "AGAIN_S", 0.001)
    shell.turns.stands = error
    shell.cancel_queued(conversation="c")
    await shell.until(lambda: caplog.text.count("turn.look_up_waits request_id=r") > 3 or shell.ended)
    assert shell.ended == []
    shell.turns.stands = answer_of("r", "said before")
    await shell.until_ended()
    assert shell.ended == [("r", "completed")]


async def test_a_look_that_fails_ends_when_its_request_goes_to_another_worker(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "AGAIN_S", 0.001)
    shell.turns.stands = OSError("away")
    shell.cancel_queued(conversation="c")
    await shell.until(lambda: len(shell.turns.mine) > 3 or shell.ended)
    shell.flow.assigned({}, 2, fenced=False, now=shell.now)
    await shell.until_idle()
    assert shell.ended == []


# -- large outputs


async def test_a_large_output_becomes_an_artifact(shell: Shell, tmp_path: Path) -> None:
    terminal = await shell.run({"text": LARGE})
    assert terminal.artifact is not None
    (content,) = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file() and LARGE in path.read_text()]
    assert json.loads(content.read_text()) == {"text": LARGE}


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("spooled", [True, False])
async def test_an_output_that_the_store_does_not_take_is_stored_later(
    make: Callable[..., Shell], tmp_path: Path, kind: str, spooled: bool
) -> None:
    """The store is a folder where a file stands; then the file is taken away."""
    shell = make(spool_bytes=10 << 20 if spooled else 0)
    in_the_way = tmp_path / "artifacts"
    in_the_way.write_text("a file where a folder should be")
    await shell.begin(**(DRAWING if kind == "images" else {}))
    shell.engine.finish_with({"text": LARGE} if kind == "text" else {"images": [{**MADE, "data": bytes(2**20)}]})
    for _ in range(3):
        await shell.until(lambda: shell.work().stage is Stage.AWAITING_STORE)
        assert shell.turns.finished == [], "an answer never stands before what it refers to"
        assert (shell.spool.used_bytes > 2**18) == spooled
        assert (shell.flow.registry.output_bytes > 2**18) != spooled
        shell.pass_time(10.0)
    await shell.until(lambda: shell.work().stage is Stage.AWAITING_STORE)
    said = [one.detail for one in shell.effects(ask.Status) if one.detail]
    assert [str(in_the_way) in detail and "File exists" in detail for detail in said] == [True]
    in_the_way.unlink()
    shell.pass_time(10.0)
    terminal = await shell.until_ended()
    await shell.until_idle()
    assert (terminal.status, terminal.subject.attempt) == ("completed", 1)
    store = ArtifactStore(in_the_way)
    if kind == "text":
        assert json.loads(store.get("default", terminal.artifact.artifact_id)) == {"text": LARGE}
    else:
        (image,) = terminal.finished.output["images"]
        assert store.get("default", image["artifact_id"]) == bytes(2**20)
        assert [one.artifact_id for one in shell.turns.finished[0].artifacts] == [image["artifact_id"]]
    shell.seen.clear()  # the effects that were carried out

    def given_back() -> bool:
        gc.collect()
        return (shell.spool.used_bytes, shell.flow.registry.output_bytes) == (0, 0)

    await wait_until_async(given_back, 30)  # the thread that read it lets go of it a moment later


async def test_an_output_that_is_too_large_for_its_store_fails_its_request(
    make: Callable[..., Shell], tmp_path: Path
) -> None:
    shell = make(outputs=Outputs(tmp_path / "small", ArtifactsSection(max_bytes=1_000)))
    terminal = await shell.run({"text": LARGE})
    assert (terminal.status, terminal.error.code) == ("failed", "too_large")


# -- the end


async def test_closing_ends_what_is_under_way(shell: Shell) -> None:
    shell.engine.answers.clear()
    shell.submit("r")
    await shell.until(lambda: shell.engine.prepared)
    await asyncio.wait_for(shell.execution.close(), 5)
    assert shell.ended == []
    assert not shell.execution._tasks  # pyright: ignore[reportPrivateUsage]


# -- images


async def test_images_are_fetched_before_the_run_and_the_payload_comes_whole(shell: Shell) -> None:
    shell.defaults = {"inference_steps": 9, "temperature": 0.5}
    spec = await shell.begin(task="image_editing", payload=EDIT)
    assert shell.fetched == [
        ("default", {"artifact_id": "a"}, "payload.image"),
        ("default", {"url": "https://x/m.png"}, "payload.mask"),
    ]
    assert {place: image.mode for place, image in spec.images.items()} == {"image": "RGB", "mask": "RGB"}
    given = {name: value for name, value in EDIT.items() if value is not None}
    assert spec.payload == {**given, "inference_steps": 9}


async def test_images_made_become_artifacts_before_the_answer_and_the_event_refer_to_them(
    shell: Shell, tmp_path: Path
) -> None:
    spec = await shell.begin(**DRAWING)
    assert spec.history is None, "such a model reads no history"
    shell.engine.finish(images=[{**MADE, "data": b"one"}, {**MADE, "data": b"two"}])
    terminal = await shell.until_ended()
    images = terminal.finished.output["images"]
    store = ArtifactStore(tmp_path / "artifacts")
    assert [store.get("default", image["artifact_id"], sha256=image["sha256"]) for image in images] == [b"one", b"two"]
    assert [(image["bytes"], image["seed"], image["width"]) for image in images] == [(3, 7, 4), (3, 7, 4)]
    assert usage_of(terminal.finished).pixels == 16
    assert shell.metric("penstock_pixels_total") == 16
    (answer,) = shell.turns.finished
    references = [(one.artifact_id, one.sha256) for one in answer.artifacts]
    assert references == [(image["artifact_id"], image["sha256"]) for image in images]
    assert (answer.role, answer.content) == ("assistant", "")
    facts = store.describe("default", images[0]["artifact_id"])
    assert (facts.request_id, facts.conversation_id) == ("r", answer.conversation_id)


async def test_previews_are_kept_and_published_while_the_run_goes_on(shell: Shell, tmp_path: Path) -> None:
    await shell.begin(task="image_generation", payload={"prompt": "p"})
    spec, _, sink = shell.engine.only_run()
    for step in (1, 2):
        image = {"image": b"small", "media_type": "image/jpeg", "width": 2, "height": 2}
        sink.on_preview(Preview(run_id=spec.run_id, step=step, steps=4, **image))
    await shell.until(lambda: shell.shown)
    (shown,) = shell.shown  # the second came while the first was on its way
    assert (shown.step, shown.steps) == (1, 4)
    kept = ArtifactStore(tmp_path / "artifacts")
    assert kept.get("default", shown.image["artifact_id"]) == b"small"
    described = kept.describe("default", shown.image["artifact_id"])
    assert described.expires_at_ms == described.created_at_ms + PREVIEW_KEPT_S * 1000, "no outcome will name it"
    sink.on_preview(Preview(run_id=spec.run_id, step=3, steps=4, **image))
    shell.engine.finish(images=[])
    await shell.until_ended()
    await shell.until_idle()
    assert len(shell.shown) == 1, "an ended run shows nothing"


# -- summaries


async def test_a_summary_is_added_to_its_conversation(shell: Shell) -> None:
    spec = await shell.begin(**SUMMING)
    assert spec.history.messages == shell.turns.history
    assert spec.payload == {"through_offset": 7, "covers_through": 7}, "for the engine's output"
    shell.engine.finish_with({"text": "short", "covers_through": 7})
    terminal = await shell.until_ended()
    assert (terminal.status, terminal.finished.output) == ("completed", {"text": "short", "covers_through": 7})
    (added,) = shell.turns.finished
    assert (added.direction, added.role, added.content, added.covers_through) == ("summary", "system", "short", 7)
    assert (added.conversation_id, added.request_id, added.model) == ("c", "r", terminal.subject.lane)
    assert shell.turns.begun == [], "it is no turn"


@pytest.mark.parametrize(
    ("text", "asked", "code"),
    [
        pytest.param(" \n", SUMMING, "engine_failed", id="without a word: it would stand for all that it covers"),
        pytest.param(
            "short",
            {"task": "summarization", "payload": {"conversation_id": "c"}},
            None,
            id="of a conversation that is only read",
        ),
    ],
)
async def test_a_summary_that_is_not_kept(shell: Shell, text: str, asked: dict[str, Any], code: str | None) -> None:
    terminal = await shell.run({"text": text, "covers_through": 7}, **asked)
    assert (terminal.error and terminal.error.code) == code
    assert shell.turns.finished == []


async def test_there_is_no_summary_of_nothing(shell: Shell) -> None:
    shell.turns.history = []
    shell.submit("r", **SUMMING)
    terminal = await shell.until_ended()
    assert (terminal.error.code, terminal.error.param) == ("not_found", "conversation_id")


# -- turns about images


async def test_an_edit_shows_what_it_named_and_gets_what_it_did_not_name(shell: Shell) -> None:
    brought = {"prompt": "p", "image": {"artifact_id": "a"}, "mask": {"artifact_id": "mask"}}
    await shell.begin(task="image_editing", payload=brought, conversation="c")
    assert shell.turns.shown == [{0: [picture("a")]}]
    shell.engine.finish(images=[{**MADE, "data": b"one"}])
    await shell.until_ended()
    shell.turns.pictured = [replace(answer_of("before", ""), artifacts=[picture("cat")])]
    spec = await shell.begin(
        "blue", task="image_editing", payload={"prompt": "make it blue", "image": {}}, conversation="c"
    )
    assert spec.payload == {"prompt": "make it blue", "image": {"artifact_id": "cat"}}
    assert spec.images.keys() == {"image"}
    assert shell.fetched[-1][1] == {"artifact_id": "cat", "sha256": "cat"}
    assert shell.turns.shown[-1] == {}


async def test_images_of_a_cancelled_turn_are_awaited_from_their_store(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker died between the answer and its outcome. The next one could not ask the store what it knows of the
    images, and ended the turn as cancelled, whose answer its conversation shows."""
    kept = ArtifactStore(tmp_path / "artifacts").put("default", b"drawn", media_type="image/png", width=4, height=2)
    shell.turns.stands = replace(answer_of("r", ""), artifacts=[reference_to(kept)])
    describe, asked = ArtifactStore.describe, Counter[str]()

    def away_at_first(store: ArtifactStore, tenant: str, artifact_id: str) -> Artifact:
        asked[artifact_id] += 1
        if asked[artifact_id] <= 3:
            raise StoreUnavailable("away", retry_after_s=1)
        return describe(store, tenant, artifact_id)

    monkeypatch.setattr(ArtifactStore, "describe", away_at_first)
    monkeypatch.setattr(execution, "AGAIN_S", 0.001)
    shell.cancel_queued(**DRAWING)
    terminal = await shell.until_ended()
    assert asked[kept.artifact_id] > 3
    assert terminal.status == "completed"
    assert terminal.finished.output == {"images": [{**kept.reference(), "expires_at": None}]}


class Talking(Shell):
    """A worker with real turns and a real store, on a topic that outlives it."""

    def __init__(self, artifacts: Path, log: MemoryLog) -> None:
        self.store = ArtifactStore(artifacts)
        super().__init__(artifacts, turns=turns_of(log, held=HeldImages(lambda: self.store)))
        self.up(slots=4)

    async def turn(self, request_id: str, task: str, *pictures: bytes, **payload: Any) -> list[str]:
        """A turn that draws; the ids of what it made."""
        self.submit(request_id, task=task, payload=payload, conversation="trip")
        if pictures:
            await self.until_running()
            self.engine.finish(images=[{**MADE, "data": data} for data in pictures])
        terminal = await self.until_ended(request_id)
        assert terminal.status == "completed", terminal.error
        return [image["artifact_id"] for image in terminal.finished.output["images"]]


async def test_a_conversation_from_drawing_to_erasure_across_the_death_of_a_worker(tmp_path: Path) -> None:
    log = MemoryLog()
    first = Talking(tmp_path / "artifacts", log)
    drawn = await first.turn("draw", "image_generation", b"cat 1", b"cat 2", prompt="a cat")
    # It dies here: what stands in the log is the outcome of whoever reads the request again, and no engine runs.
    await first.execution.close()
    second = Talking(tmp_path / "artifacts", log)
    assert await second.turn("draw", "image_generation", prompt="a cat") == drawn
    edited = await second.turn("edit", "image_editing", b"blue cat", prompt="make it blue", image={})
    assert second.fetched[-1][1]["artifact_id"] == drawn[-1], "the newest image"
    store = second.store
    assert store.holds.held_by("default", "trip") == sorted([*drawn, *edited])
    with pytest.raises(Conflict):
        store.delete("default", drawn[0])
    assert await second.turns.erase("default", "trip", "draw") == 2
    assert [store.peek("default", one) for one in drawn] == [None, None]
    assert store.holds.held_by("default", "trip") == edited
    assert store.get("default", edited[0]) == b"blue cat"
    store.conversation_gone("default", "trip", store.holds.marks_of("default", "trip"))
    assert store.peek("default", edited[0]) is None
    await second.execution.close()


def test_text_that_cannot_be_published_has_a_size() -> None:
    """Publishing refuses it by name; a fault here would end the worker."""
    assert size_of({"text": "\ud800"}) == 3


async def test_an_output_that_a_hanging_store_does_not_take_ends_its_request_at_the_deadline(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline has passed, by this machine's clock: the store has the least time that it is given."""
    let_go = threading.Event()
    monkeypatch.setattr(execution, "STORE_S", 0.05)
    monkeypatch.setattr(ArtifactStore, "put", lambda *_, **named: let_go.wait(60))
    terminal = await shell.run({"text": LARGE})
    assert (terminal.status, terminal.error.code) == ("expired", "expired")
    assert "store does not answer" in terminal.error.message
    let_go.set()
