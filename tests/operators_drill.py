"""The operator's drill: each order meets a model in each state; then nothing follows, or a killed worker or gateway.

One system runs all combinations side by side. Whatever the drill waits for, it samples what the gateway says of all
requests and models, and holds it against `drill_truths.py`. A statement that lags behind an event is no fault; one that
is untrue in each sample for longer than GRACE_S is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from drill_truths import (
    COMBINATIONS,
    LONG,
    ROLES,
    SHORT,
    Combination,
    World,
    final_state,
    fits,
    history_of,
    model_facts,
    outcome_of,
    question,
    reasons_of,
)
from penstock.cli.main import app
from system import Process, System, free_port

GRACE_S = 4.0
"""So long a statement may lag behind what happened: reports come each second, on a machine that is busy."""
LATE_S = 5.0
"""A worker that is silent for so long counts as dead: `gateway.worker_late_s`."""
POLL_S = 0.2
DEADLINE_S = 90.0
WAITING = ("accepted", "queued", "waiting_for_memory", "loading_model", "retrying")

Json = dict[str, Any]


@dataclass(slots=True)
class Asked:
    """A request of a combination, and what the gateway said of it last."""

    combination: Combination
    role: str
    request_id: str
    said: Json = field(default_factory=dict[str, Any])

    @property
    def done(self) -> bool:
        return bool(self.said.get("done"))

    @property
    def reason(self) -> str | None:
        return (self.said.get("waiting_for") or {}).get("reason")

    @property
    def name(self) -> str:
        return f"{self.combination.model} {self.role}"

    def __str__(self) -> str:
        return f"{self.name}: {self.said.get('status')} {self.said.get('waiting_for')}"


class Untruths:
    """Statements that contradict the world, each since when and in how many samples in a row."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}
        self._not_before = 0.0
        self.proven: dict[str, None] = {}

    def sampled(self, untrue: set[str], now: float) -> None:
        """`untrue`: all that is untrue in the sample of this moment."""
        before, self._since = self._since, {}
        for statement in untrue if now >= self._not_before else ():
            since, samples = before.get(statement, (now, 0))
            self._since[statement] = (since, samples + 1)
            if now - since > GRACE_S and samples >= 3:
                self.proven[statement] = None

    def event(self, unnoticed_s: float = 0.0) -> None:
        """The world has changed, which nobody can know for so long: the grace begins after that."""
        self._since.clear()
        self._not_before = time.monotonic() + unnoticed_s


class Drill:
    """Drives one system. `world` is what it knows; `asked` all requests that were accepted.

    While the file `hold` exists, nothing that runs or loads ends, so that states outlast the orders on any machine.
    """

    def __init__(self, system: System, hold: Path) -> None:
        self._hold = hold
        self.system, self.world, self.untruths = system, World(), Untruths()
        self.worker: Process = system.worker("w1")
        self._port = free_port()
        self.gateway: Process = system.gateway("g1", port=self._port)
        self.gateway.wait_ready()
        self.worker.wait_ready()
        self.http = httpx.Client(base_url=self.gateway.url, timeout=30)
        self.asked: list[Asked] = []
        self.models: dict[str, Json] = {}

    # -- what it does

    def post(self, path: str, body: Json | None = None, **params: str) -> Json:
        answer = self.http.post(path, json=body, params=params)
        assert answer.status_code == 202, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def ask(self, combination: Combination, role: str) -> Asked:
        text = question(combination, role)
        tokens = LONG if role == "runs" else SHORT
        given: Json = {"prompt": text}
        if combination.conversation is not None:
            given = {"messages": [{"role": "user", "content": text}]}
        body = {
            "task": "text_generation",
            "model": combination.model,
            "conversation_id": combination.conversation,
            "payload": {**given, "max_tokens": tokens},
        }
        asked = Asked(combination, role, self.post("/v1/requests", body)["request_id"])
        self.asked.append(asked)
        return asked

    def order(self, combination: Combination, action: str) -> int:
        """The revision of the order, once it is acknowledged."""
        if action == "replace":
            return self.post("/v1/admin/models", combination.replacement(), replace="true")["revision"]
        if action == "remove":
            answer = self.http.delete(f"/v1/admin/models/{combination.model}")
            assert answer.status_code == 202, answer.text
            return answer.json()["revision"]
        revision = self.post(f"/v1/admin/models/{combination.model}/{action}")["revision"]
        if action == "pause":
            self.world.paused.add(combination.model)
        if action == "resume":
            self.world.paused.discard(combination.model)
        return revision

    # -- waiting and judging

    def until(self, condition: Callable[[], bool], describe: str, deadline_s: float = DEADLINE_S) -> None:
        """Sample and judge until the condition holds. AssertionError with all that was seen after the deadline."""
        give_up = time.monotonic() + deadline_s
        while True:
            self.sample()
            if condition():
                return
            if time.monotonic() > give_up:
                raise AssertionError(f"not within {deadline_s} s: {describe}\n{self.seen()}")
            time.sleep(POLL_S)

    def settle(self) -> None:
        """Sample for so long that what is still untrue at the end is proven."""
        ends = time.monotonic() + GRACE_S + 1.5
        self.until(lambda: time.monotonic() > ends, "the time to pass")

    def sample(self) -> None:
        """Read what the gateway says of everything, and note what of it is untrue."""
        listed = {one["request_id"]: one for one in self._requests()}
        for asked in self.asked:
            asked.said = listed.get(asked.request_id, {})
        self.models = {one["id"]: one for one in self.http.get("/v1/admin/models").json()["data"]}
        public = {one["id"]: one for one in self.http.get("/v1/models").json()["data"]}
        readiness = self.http.get("/readyz").json()
        said = Statements(self)
        untrue = {*said.of_requests(), *said.of_models(public), *said.of_readiness(readiness)}
        self.untruths.sampled(untrue, time.monotonic())

    def _requests(self) -> Iterator[Json]:
        after: str | None = None
        while True:
            params = {"limit": "100", **({"after": after} if after else {})}
            page = self.http.get("/v1/requests", params=params).json()
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def seen(self) -> str:
        """All that is open, what was untrue, and the ends of the logs."""
        is_open = "\n".join(str(asked) for asked in self.asked if not asked.done)
        states = {name: model["state"] for name, model in self.models.items()}
        untrue = "\n".join(self.untruths.proven)
        return f"open:\n{is_open}\nmodels: {states}\nuntrue:\n{untrue}\n{self.system.logs(25)}"

    # -- the parts of the drill, in order

    def reach_states(self) -> None:
        """Bring each model into its state."""
        self.until(self._preloaded, "all models that are to be preloaded are ready")
        early = [self.ask(one, "asked before") for one in COMBINATIONS if one.was_asked_before]
        self.until(lambda: all(asked.done for asked in early), "what has a model loaded has ended")
        self._hold.touch()
        # Two requests of a model may lie on two partitions: the second is asked once the first is on the engine.
        for combination in COMBINATIONS:
            if "runs" in ROLES[combination.state]:
                self.ask(combination, "runs")
        self.until(self._runs_and_waits, "what is to run runs")
        for combination in COMBINATIONS:
            if "runs" in ROLES[combination.state]:
                for role in ROLES[combination.state][1:]:
                    self.ask(combination, role)
        self.until(self._runs_and_waits, "what is to run runs, and what is behind it says what it waits for")
        for combination in COMBINATIONS:
            if combination.state == "loading":
                self.ask(combination, *ROLES["loading"])
        for combination in COMBINATIONS:
            if combination.order == "resume":
                self.order(combination, "pause")
        self.until(self._loads_and_pauses, "what is to load loads, and what is paused says so")

    def _preloaded(self) -> bool:
        wanted = [one.model for one in COMBINATIONS if one.is_preloaded]
        return all(self.models.get(name, {}).get("state") == "ready" for name in wanted)

    def _runs_and_waits(self) -> bool:
        return all(
            asked.said.get("status") == "running" if asked.role == "runs" else asked.done or asked.reason is not None
            for asked in self.asked
        )

    def _loads_and_pauses(self) -> bool:
        return all(
            (asked.combination.order == "resume" and asked.reason in ("paused", "conversation"))
            if asked.combination.model in self.world.paused and asked.role != "runs"
            else asked.reason == "model_loading"
            for asked in self.asked
            if asked.combination.state == "loading"
        )

    def give_orders(self) -> int:
        """Give each model its order; the newest revision. The states must have held until then."""
        revisions = [self.order(combination, combination.order) for combination in COMBINATIONS]
        self.world.ordered = True
        self.untruths.event()
        return max(revisions)

    def observed(self, revision: int) -> None:
        """Until the worker has followed the orders."""
        path = f"/v1/admin/orders/{revision}"
        self.until(lambda: self.http.get(path).json()["observed"], "the worker observes the orders")

    def restart_worker(self) -> None:
        """Kill the worker; once everybody says so, start another."""
        pid = self.worker.popen.pid
        self.worker.kill9()
        self.world.worker_up, self.world.worker_was_killed = False, True
        self.untruths.event(LATE_S)
        time_of_death = time.monotonic()
        self.until(self._all_say_no_worker, "each open request says that no worker is there", LATE_S + 30)
        assert time.monotonic() - time_of_death >= LATE_S / 2, "the gateway judged a worker dead that had just reported"
        self._hold.unlink()
        self.worker = self.system.worker("w1")
        assert self.worker.popen.pid != pid
        self.until(self.worker.ready, "the worker is ready again")
        self.world.worker_up = True
        self.untruths.event()

    def _all_say_no_worker(self) -> bool:
        return all(
            asked.done or asked.said.get("status") == "running" or asked.reason == "no_worker" for asked in self.asked
        )

    def restart_gateway(self) -> None:
        """Kill the gateway and start it on the same port, over the same view."""
        pid = self.gateway.popen.pid
        self.gateway.kill9()
        self.gateway = self.system.gateway("g1", port=self._port)
        self.gateway.wait_ready()
        assert self.gateway.popen.pid != pid
        self.untruths.event()

    def heal(self) -> None:
        """Let what runs and loads end, and resume what is paused. From then on everything must end."""
        self._hold.unlink(missing_ok=True)
        for combination in COMBINATIONS:
            if combination.model in self.world.paused:
                self.order(combination, "resume")
        self.untruths.event()
        self.until(lambda: all(asked.done for asked in self.asked), "everything has its outcome")

    # -- what must be true at the end

    def judge(self) -> None:
        """Outcomes, states and conversations; then each model that is served answers once more."""
        self.until(lambda: not self._wrong_states(), "all models come to their states", 40)
        self.probe()
        end = AtTheEnd(self)
        problems = [*self.untruths.proven, *end.wrong_outcomes(), *end.wrong_histories(), *end.wrong_list()]
        assert not problems, "\n".join(problems) + "\n" + self.seen()
        self.system.wait_drained()
        problems = list(end.wrong_log())
        assert not problems, "\n".join(problems) + "\n" + self.seen()

    def _wrong_states(self) -> dict[str, tuple[str | None, str | None]]:
        """Models by name: the state that they have, and the one that they must come to."""
        pairs = {
            one.model: (self.models.get(one.model, {}).get("state"), final_state(one, self.world))
            for one in COMBINATIONS
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def probe(self) -> None:
        """Whoever asks now gets an answer of the engine that is ordered, or hears that there is no such model."""
        for combination in COMBINATIONS:
            if combination.order == "remove":
                body = {"task": "text_generation", "model": combination.model, "payload": {"prompt": "x"}}
                refused = self.http.post("/v1/requests", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), refused.text
            elif combination.conversation is None:
                self.ask(combination, "probe")
        self.until(lambda: all(asked.done for asked in self.asked), "who asks at the end is answered")


class Statements:
    """What a sample says that is untrue of the drill's world."""

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    def of_requests(self) -> Iterator[str]:
        for asked in self._drill.asked:
            if asked.done:
                continue
            open_roles = self._open_roles(asked.combination)
            state = self._drill.models.get(asked.combination.model, {}).get("state")
            true = reasons_of(asked.combination, asked.role, open_roles, state, self._drill.world)
            status = asked.said.get("status")
            if status is None:
                yield f"{asked.request_id} of {asked.combination.model} is not listed"
            elif status == "running" and self._drill.world.worker_up and asked.reason is not None:
                yield f"{asked.name}: runs, and waits for {asked.reason}"
            elif (status in WAITING or not self._drill.world.worker_up) and asked.reason not in true:
                # A worker that is dead leaves what it said last: the gateway alone knows better.
                runs_on = status == "running" and not self._drill.world.worker_up
                if not runs_on:
                    why = f"as the model is {state}, open are {', '.join(open_roles)}"
                    yield f"{asked.name}: {status}, {asked.reason}; true is {sorted(true)}, {why}"
            if self._drill.world.worker_up and not fits(status, asked.reason):
                yield f"{asked.name}: {status}, but it waits for {asked.reason}"
            waiting = asked.said.get("waiting_for") or {}
            if asked.reason in ("paused", "no_worker", "conversation") and waiting["estimated_start_at"] is not None:
                yield f"{asked.name}: {asked.reason}, and nobody can know when it starts"

    def _open_roles(self, combination: Combination) -> dict[str, str]:
        return {
            one.role: one.said.get("status", "unknown")
            for one in self._drill.asked
            if one.combination == combination and not one.done
        }

    def of_models(self, public: dict[str, Json]) -> Iterator[str]:
        for combination in COMBINATIONS:
            facts, name = model_facts(combination, self._drill.world), combination.model
            shown = self._drill.models.get(name)
            if (shown is not None) != facts.listed or (name in public) != facts.listed:
                yield f"{name}: listed for operators {shown is not None}, for all {name in public}; true is {facts}"
                continue
            if shown is None:
                continue
            said = {key: shown[key] for key in ("paused", "pinned", "available")}
            if said != {"paused": facts.paused, "pinned": facts.pinned, "available": facts.available}:
                yield f"{name}: shown as {said}; true is {facts}"
            if any(public[name][key] != shown[key] for key in ("state", "available")):
                yield f"{name}: {shown['state']} for operators, {public[name]['state']} for all"
            if not facts.available and shown["state"] != "absent":
                yield f"{name}: {shown['state']} without a worker"

    def of_readiness(self, readiness: Json) -> Iterator[str]:
        true = "ready" if self._drill.world.worker_up else "degraded"
        if readiness["status"] != true:
            yield f"readyz says {readiness}; true is {true}"
        listed = {one.model for one in COMBINATIONS if model_facts(one, self._drill.world).listed}
        if set(readiness["models_without_worker"]) != (set() if self._drill.world.worker_up else listed):
            yield f"readyz: models_without_worker {readiness['models_without_worker']}"


class AtTheEnd:
    """What is wrong once everything has ended."""

    def __init__(self, drill: Drill) -> None:
        self._drill = drill

    def wrong_outcomes(self) -> Iterator[str]:
        for asked in self._drill.asked:
            true = outcome_of(asked.combination, asked.role, self._drill.world)
            if asked.role == "asked before":
                true = outcome_of(Combination("pin", "running"), "waits", self._drill.world)
            said = self._drill.http.get(f"/v1/requests/{asked.request_id}").json()
            code = (said["error"] or {}).get("code")
            engine = None if said["result"] is None else engine_of(said["result"]["text"])
            if (said["status"], engine, code) != (true.status, true.engine, true.code):
                yield f"{asked}: {said['status']} {engine} {said['error']}; true is {true}"

    def wrong_histories(self) -> Iterator[str]:
        for combination in COMBINATIONS:
            if combination.conversation is None:
                continue
            answers = {
                asked.role: self._drill.http.get(f"/v1/requests/{asked.request_id}").json()["result"]["text"]
                for asked in self._drill.asked
                if asked.combination == combination and asked.said["status"] == "completed"
            }
            path = f"/v1/conversations/{combination.conversation}/items"
            items = self._drill.http.get(path, params={"order": "asc", "limit": "100"}).json()["data"]
            found = [(item["role"], item["content"][0]["text"]) for item in items]
            true = history_of(combination, answers)
            # A turn that was cut off by the kill, and is refused since, has asked but got no answer.
            cut_off = [("user", question(combination, "runs"))] if not answers else []
            if found not in (true, true + cut_off):
                yield f"{combination.conversation} holds {found}; true is {true}"
            second = answers.get("second turn", "")
            if second and engine_of(second) == "new":
                context = [(one["role"], one["content"]) for one in json.loads(second)]
                if context != true[:-1]:
                    yield f"{combination.conversation}: the second turn saw {context}; true is {true[:-1]}"

    def wrong_list(self) -> Iterator[str]:
        """`penstock models list` says of each model what the gateway says."""
        result = CliRunner().invoke(app, ["models", "list", "--json", "--url", self._drill.gateway.url])
        assert result.exit_code == 0, result.output
        listed = {one["id"]: one for one in map(json.loads, result.stdout.splitlines())}
        for combination in COMBINATIONS:
            state = listed.get(combination.model, {}).get("state")
            true = None if combination.order == "remove" else "ready"  # the probe had it loaded
            if combination.conversation is None and state != true:
                yield f"penstock models list: {combination.model} is {state}; true is {true}"

    def wrong_log(self) -> Iterator[str]:
        """On the result topic each request has one outcome, which is the one that the gateway tells."""
        events = [event for event in self._drill.system.results() if event.is_terminal]
        folded = self._drill.system.outcomes()
        for asked in self._drill.asked:
            count = sum(event.request_id == asked.request_id for event in events)
            if count != 1 and not (count and self._drill.world.worker_was_killed):
                yield f"{asked}: {count} terminal events"
            if folded[asked.request_id].status != asked.said["status"]:
                yield f"{asked}: {folded[asked.request_id].status} for a reader of the topic"
        strangers = {event.request_id for event in events} - {asked.request_id for asked in self._drill.asked}
        if strangers:
            yield f"outcomes of requests that nobody sent: {strangers}"


def engine_of(text: str) -> str:
    """Which engine made an answer: the old one counts words, the new one repeats what it was given."""
    return "old" if text.startswith("word0 ") else "new"


def run_drill(drill: Drill, follower: str) -> None:
    """All combinations with what follows their orders."""
    drill.reach_states()
    revision = drill.give_orders()
    if follower == "worker restart":
        drill.restart_worker()
    elif follower == "gateway restart":
        drill.restart_gateway()
    drill.observed(revision)
    drill.untruths.event()
    drill.settle()
    drill.heal()
    drill.judge()
