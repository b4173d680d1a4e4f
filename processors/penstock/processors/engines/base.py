"""What every engine offers, and the values that cross between it and the worker.

How a run ends. Each run that `run` began ends in exactly one of: `on_finished` or `on_failed` of its sink, `cancel`,
the engine's `on_died`, or the engine's `stop`. The last three call no method of its sink: the caller of `cancel` or
`stop` knows, and `on_died` is called once for all runs that the engine had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any, Protocol

from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.earlier_messages import EarlierMessages, Message
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.encoded import EncodedImage
from penstock.schemas.errors import EngineFailed, PenstockError, RetryKind, UnsupportedParameter
from penstock.schemas.message_parts import image_parts
from penstock.schemas.payloads import only_remote
from penstock.schemas.records import ContextHeld, ContextLimits, OutputSpec, record


class EngineState(StrEnum):
    """Where an engine is in its life. There is no way back: a model that shall run again gets a new engine."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"  # its process ended, or is ending, unasked
    STOPPED = "stopped"


class EngineGone(EngineFailed):
    """The engine died or was stopped while it prepared this: the request is not at fault, and spends no attempt."""

    retry_kind = RetryKind.PUT_BACK


class TurnedAway(EngineGone):
    """The server behind the engine did not take it: it goes back to the queue, and spends no attempt."""


@record
class RunSpec:
    """One run: a request's work in one attempt. `run_id` is unique per attempt, so that engines never see a repeat."""

    run_id: str
    task: str
    model: str
    messages: list[Message] | None = None
    history: EarlierMessages | None = None
    prompt: str | None = None
    inputs: list[str] | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The whole payload in its normal form without nulls, the model's defaults filled in; empty for text and
    embeddings, which come as the fields above."""
    images: Mapping[str, DecodedImage] = field(default_factory=dict[str, DecodedImage])
    """The images that the payload names, by their place in it: `image`, `mask`, `operations[2].image`."""
    files: Mapping[str, EncodedImage] = field(default_factory=dict[str, EncodedImage])
    """The same unopened, in place of `images`, for kinds of engines that open them themselves, under guard."""
    output: OutputSpec | None = None
    """The form of the images to be made."""
    defaulted: frozenset[str] = frozenset()
    """Those of `params` that the model's defaults gave: an answer's length is then cut to what fits, not refused."""
    context: ContextLimits | None = None
    stream: bool = False
    extra: dict[str, str] = field(default_factory=dict[str, str])
    request_id: str = ""
    """The same in every attempt: what is named after it has its name again when the work is done again."""
    published: PublishedPrefix | None = None
    """What the run may go on from; an engine that cannot begins again."""
    priority: int = 5
    """0 is the most urgent. What it was when the run was prepared."""


@record
class Prepared:
    """A run ready for admission: its prompt's tokens and how many tokens of the engine's cache it needs in all.

    `memory_bytes`: what it takes of the engine's device while it runs, beyond what the engine holds then.
    """

    run_id: str
    prompt_tokens: int
    need_tokens: int
    memory_bytes: int = 0
    held: ContextHeld | None = None
    """What of its conversation the prompt has; None where there is none."""
    messages: list[Message] | None = None
    goes_on: bool = False
    """Whether the run continues the published prefix of its spec; its deltas then begin behind that."""


@record
class Delta:
    """New text with its tokens; `first_token_index` counts the tokens of the run before it.

    `calls`: pieces of calls of tools, each {index, id, name, arguments, offset}: id and name come with the first piece
    of a call, `offset` counts the characters of its arguments before this piece. `logprobs`: the log probabilities of
    the run's next tokens, as its output has them, where they were asked for.
    """

    run_id: str
    text: str
    token_ids: list[int]
    first_token_index: int
    calls: Sequence[dict[str, Any]] = ()
    logprobs: Sequence[dict[str, Any]] = ()


@record
class StepProgress:
    """A run has done a step of so many."""

    run_id: str
    step: int
    steps: int


@record
class Preview:
    """What there is so far of an image on its way: `image` is a small file."""

    run_id: str
    step: int
    steps: int
    image: bytes
    media_type: str
    width: int
    height: int


@record
class Finished:
    """The whole output of a run.

    One of images is {"images": [{"data": bytes, "media_type", "width", "height", "seed"}]}: the worker keeps the bytes
    as artifacts, and what is published refers to them.
    """

    run_id: str
    output: dict[str, Any]
    finish_reason: str | None
    usage: dict[str, int] | None = None

    @property
    def prompt_tokens(self) -> int:
        return (self.usage or {}).get("prompt_tokens", 0)

    @property
    def completion_tokens(self) -> int:
        return (self.usage or {}).get("completion_tokens", 0)


@record
class RunFailed:
    """A run ended without output. `retryable_here`: the same run may succeed on this worker."""

    run_id: str
    error: PenstockError
    retryable_here: bool


@record
class Limits:
    """How many runs and how many of their `need_tokens` may be on an engine together; None: tokens do not limit."""

    slots: int
    tokens: int | None = None


@record
class EngineInfo:
    """What a loaded engine can do. Lengths are in tokens."""

    context_window: int | None = None
    max_output_tokens: int | None = None
    dimensions: int | None = None
    device: str = "cpu"
    note: str | None = None
    """What an operator should know of it while it serves."""


class Sink(Protocol):
    """Where a run's events go; called on the event loop."""

    def on_delta(self, delta: Delta) -> None: ...
    def on_progress(self, progress: StepProgress) -> None: ...
    def on_preview(self, preview: Preview) -> None: ...
    def on_finished(self, finished: Finished) -> None: ...
    def on_failed(self, failed: RunFailed) -> None: ...


def _unheard(*_: object) -> None:
    """News to which nobody listens."""


class Engine(Protocol):
    """One loaded model. All methods are called on the event loop. It never starts itself again.

    Its own default is an engine without a process, whose memory nobody measures and to whose news nobody listens.
    """

    model: str
    prepares_inline: bool
    """`prepare` never awaits."""
    on_died: Callable[[int], None] = staticmethod(_unheard)
    """Called once, with the exit code, when its process ends unasked after it was ready, or is left (`left_pid`)."""
    on_busy: Callable[[float], None] = staticmethod(_unheard)
    """PublishedPrefix for how many seconds the engine should get no new runs."""
    on_limits: Callable[[Limits], None] = staticmethod(_unheard)
    """PublishedPrefix its limits when they have changed since `start`."""
    on_out_of_memory: Callable[[], None] = staticmethod(_unheard)
    """PublishedPrefix when memory ran out in a batch that it went on without: it needs more than it was granted."""

    _state: EngineState = EngineState.NEW

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        """The root of its tree of processes; None when it has none of its own."""
        return None

    @property
    def left_pid(self) -> int | None:
        """The pid of a process that was killed and has not ended yet: it may hold memory still."""
        return None

    async def start(self) -> None:
        """Load the model. Raises PenstockError. Cancelling it ends what it began."""
        ...

    async def prepare(self, spec: RunSpec) -> Prepared:
        """Build the prompt and count it, touching no device. Raises PenstockError for what cannot run, EngineGone."""
        ...

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        """Begin a run that was granted its slot and tokens; its events go to the sink."""
        ...

    def cancel(self, run_id: str) -> None:
        """Stop a run; no further event of it is emitted."""
        ...

    def limits(self) -> Limits:
        """After `start`."""
        ...

    async def stop(self) -> None:
        """End it. When this returns, its process has ended and its memory is free, unless `left_pid` names it. May be
        called in any state, and more than once."""
        ...

    def measured_memory(self) -> int | None:
        """Bytes that it really holds, when measured."""
        return None

    def peak_memory(self) -> int | None:
        """The most bytes that it has held since it was started, when measured."""
        return None

    def info(self) -> EngineInfo: ...


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The counts of a run that has ended."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def refuse_unsupported(spec: RunSpec, engine: str = "") -> None:
    """For engines that make text or vectors here: what a kind of them does not know is refused by name.

    Raises UnsupportedParameter.
    """
    payload = spec.params if spec.messages is None else {**spec.params, "messages": spec.messages}
    for param in only_remote(spec.task, payload, spec.extra, engine):
        raise UnsupportedParameter(
            f"{param} is not supported by {spec.model}: only models that a remote server runs know it", param=param
        )


def refuse_images(spec: RunSpec) -> None:
    """For engines that read text alone. Raises UnsupportedParameter."""
    for place in image_parts({"messages": spec.messages or ()}):
        raise UnsupportedParameter(f"{place} is an image, and {spec.model} reads text alone", param=place)
