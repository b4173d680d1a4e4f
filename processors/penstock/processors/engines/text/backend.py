"""Text generation inside the child: transformers' continuous batching behind a strict validator.

One bad request kills the batching loop with every stream in it, so each is validated here before it is added: token
ids, temperature, top_k, lengths against the cache. Stop strings are matched on the detokenised text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.engines.backend import Emit, leave
from penstock.processors.engines.base import (
    EngineInfo,
    Message,
    Prepared,
    RunFailed,
    RunSpec,
    refuse_images,
    refuse_unsupported,
)
from penstock.processors.engines.batching.sampling import GREEDY, Sampling, sampling_of
from penstock.processors.engines.context import build_context, identity
from penstock.processors.engines.process.loading import (
    batch_tokens,
    block_size,
    cache_tokens,
    device_name,
    end_ids_of,
    set_up_torch,
    text_slots,
)
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.engines.process.weights import code_option, load_weights
from penstock.processors.engines.text.batch import TextBatch
from penstock.processors.engines.text.choices import Choices
from penstock.processors.engines.text.detokenise import Detokeniser, with_marker
from penstock.processors.engines.text.prompt_options import PromptOptions, prompt_options_of
from penstock.processors.engines.text.run import TextRun
from penstock.processors.engines.text.warm_up import warm_up
from penstock.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    PenstockError,
    UnsupportedParameter,
)
from penstock.schemas.records import ContextHeld
from penstock.schemas.texts import shortened

if TYPE_CHECKING:
    from penstock.processors.engines.batching.continuous import BatchingLoop
    from penstock.processors.engines.guidance.plan import Guidance, GuidancePlan

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 512
NO_END = [-1]
"""For the loop: no token ends a text."""
FIRST_TOKEN_S = 120
LOOK_EVERY_S = 0.004
"""Tokens that come faster are taken together: the worker gathers them for longer anyway. A run's first goes at once
when the model was idle, else within this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids, how many may follow, what is wanted beyond plain text, and what the run goes on from."""

    ids: list[int]
    new_tokens: int
    plan: GuidancePlan | None
    options: PromptOptions
    published: PublishedPrefix | None = None


class TextBackend:
    """One causal language model in continuous batching."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._block = block_size(options)
        self._cache_tokens = cache_tokens(options)
        self._meter = Meter(device_name(options))
        self._runs: dict[str, TextRun] = {}
        self._choices: dict[str, Choices] = {}
        """Requests with several answers: each of those is a run of its own."""
        self._loop = asyncio.get_running_loop()
        self._will_look = False
        self._next_look: asyncio.TimerHandle | None = None
        self._model: Any = None
        self._batching: BatchingLoop
        self._batch: TextBatch
        self._tokenizer: Any = None
        self._decode: Callable[[Sequence[int]], str] = lambda ids: ""
        self._context_free = False
        self._gives_hidden_states = False
        self._eos: frozenset[int] = frozenset()
        self._all_eos: frozenset[int] = frozenset()
        self._guidance: Guidance
        self._vocabulary = 0
        self._window = 0

    def load(self) -> EngineInfo:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from penstock.processors.engines.batching.prompt_logits import gives_hidden_states

        disable_progress_bar()
        folder, extra = _folder_and_file(Path(self._source))
        device = device_name(self._options)
        set_up_torch(self._options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **extra, **code_option(self._options))
        self._model = load_weights(AutoModelForCausalLM, folder, self._options, extra)
        self._model.set_attn_implementation(f"paged|{self._options.get('attention', 'sdpa')}")
        config: Any = self._model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        self._all_eos = end_ids_of(self._model.generation_config, self._tokenizer)
        if not self._options.get("ignore_eos", False):  # for benchmarks, which want answers of one length
            self._eos = self._all_eos
        self._gives_hidden_states = gives_hidden_states(self._model)
        self._decode, self._context_free = _decoder(self._tokenizer)
        self._guidance = self._make_guidance()
        # One block is left out: a prompt with its answer must never fill the whole cache.
        longest = int(getattr(config, "max_position_embeddings", 0) or self._cache_tokens)
        self._window = min(longest, self._cache_tokens - self._block, int(self._options.get("window", 1 << 30)))
        if self._window < 2:
            raise InvalidRequest(f"a cache of {self._cache_tokens} tokens is too small for any prompt")
        self._batching = self._start_batching()
        self._first_token()
        self._batch = TextBatch(self._batching, self._options, self._put)
        self._batching.on_news = self._on_news
        return EngineInfo(context_window=self._window, max_output_tokens=self._window - 1, device=device)

    def _make_guidance(self) -> Guidance:
        from penstock.processors.engines.guidance.grammars import Grammars
        from penstock.processors.engines.guidance.plan import Guidance

        return Guidance(
            self._tokenizer,
            Grammars(self._tokenizer, vocabulary=self._vocabulary, end_ids=sorted(self._all_eos)),
            vocabulary=self._vocabulary,
            slots=int(self._options.get("slots", 64)),
            options=self._options,
        )

    def _start_batching(self) -> BatchingLoop:
        from penstock.processors.engines.batching.continuous import start_loop

        for name in ("ContinuousBatchingLogger", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
        pad_id = self._tokenizer.pad_token_id
        return start_loop(
            self._model,
            end_ids=self._end_ids(),
            pad_id=0 if pad_id is None else int(pad_id),
            max_new_tokens=DEFAULT_MAX_TOKENS,
            on_cpu=device_name(self._options) == "cpu",
            block_size=self._block,
            num_blocks=self._cache_tokens // self._block,
            max_batch_tokens=batch_tokens(self._options),
            max_requests_per_batch=text_slots(self._options),
        )

    def _first_token(self) -> None:
        """One token, so that "ready" means that the loop really runs. Raises EngineFailed with the loop's error."""
        self._batching.add("warm-up", [self._first_id()], 1, GREEDY, self._end_ids())
        outputs = self._batching.wait_for_outputs(1, FIRST_TOKEN_S)
        if not outputs or outputs[0].error is not None:
            kind = OutOfMemory if self._batching.dead and self._batching.out_of_memory else EngineFailed
            raise kind(shortened(f"the batching loop does not run: {self._batching.reason}", 500))

    def warm_up(self) -> None:
        """Its largest batch, in main memory with all of its cache. Raises OutOfMemory, EngineFailed."""
        if device_name(self._options) == "cpu":
            self._batching.touch_cache()
        warm_up(
            self._batching,
            self._batch,
            window=self._window,
            cache=self._cache_tokens,
            block=self._block,
            vocabulary=self._vocabulary,
        )
        self._batching.on_news = self._on_news

    async def before_prepare(self, spec: RunSpec) -> None:
        """Have its grammar compiled. Raises as `prepare`, and Overloaded."""
        await self._guidance.ready(spec)

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Prompt]:
        """Tokens of the prompt, and of the cache in all; the prompt is its ids, how many may follow, and the plan.

        Raises ContextLengthExceeded, InvalidRequest, UnsupportedParameter.
        """
        refuse_images(spec)
        refuse_unsupported(spec, "text")
        if spec.params.get("prompt_logprobs") is not None and not self._gives_hidden_states:
            raise UnsupportedParameter("this model gives no prompt_logprobs", param="payload.prompt_logprobs")
        plan = self._guidance.plan(spec, greedy=self._sampling(spec.params) == GREEDY)
        wanted = None if "max_tokens" in spec.defaulted else spec.params.get("max_tokens")
        reserve = int(wanted) if wanted is not None else min(64, self._window // 4)
        options = prompt_options_of(spec.extra, room=self._window - reserve)
        held: ContextHeld | None = None
        if spec.messages is not None:
            rendered: dict[tuple[int, ...], list[int]] = {}

            def count(chosen: Sequence[Message]) -> int:
                ids = rendered[identity(chosen)] = options.cut(self._render(chosen, plan, options.variables))
                return len(ids)

            context = build_context(
                spec.history,
                spec.messages,
                window_tokens=self._window,
                max_output_tokens=reserve,
                limits=spec.context,
                count=count,
            )
            held, ids = context.held, rendered[identity(context.messages)]
        elif (given := spec.params.get("prompt_token_ids")) is not None:
            ids = options.cut(list(given))
        else:
            tokens = self._tokenizer(spec.prompt or "", add_special_tokens=True)["input_ids"]
            ids = options.cut(tokens or [self._first_id()])
        new_tokens = self._fit(ids, int(wanted) if wanted is not None else None, spec)
        if plan is not None and plan.options.min_tokens > new_tokens:
            raise InvalidRequest(
                f"extra.min_tokens is {plan.options.min_tokens}, and at most {new_tokens} tokens follow",
                param="extra.min_tokens",
            )
        prompt = Prompt(ids=ids, new_tokens=new_tokens, plan=plan, options=options)
        published = spec.published if self._goes_on(spec, prompt) else None
        prepared = Prepared(
            run_id=spec.run_id,
            prompt_tokens=len(ids),
            need_tokens=self._need(len(ids) + new_tokens, plan),
            held=held,
            goes_on=published is not None,
        )
        return prepared, replace(prompt, published=published)

    def _goes_on(self, spec: RunSpec, prompt: Prompt) -> bool:
        """Whether the published tokens decode here to the published text. A run that is thrown away tries it.

        Of several answers the others are on no log.
        """
        published, plan = spec.published, prompt.plan
        if published is None or len(published.token_ids) > prompt.new_tokens:
            return False
        if plan is not None and plan.answers > 1:
            return False
        if any(not 0 <= token < self._vocabulary for token in published.token_ids):
            return False
        trial = self._run_of(spec, prompt, spec.run_id, 0, lambda event: None)
        return trial.go_on_from(published)

    def _need(self, tokens: int, plan: GuidancePlan | None) -> int:
        """Tokens of the cache for all answers: whole blocks. Raises InvalidRequest for more than it ever has."""
        answers = 1 if plan is None else plan.answers
        need = answers * -(-tokens // self._block) * self._block
        capacity = self._cache_tokens - self._block
        if answers > 1 and need > capacity:
            raise InvalidRequest(
                f"{answers} answers need {need} tokens of the cache, which has {capacity}",
                param="payload.n",
                details={"need": need, "capacity": capacity, "unit": "tokens"},
            )
        return need

    def _fit(self, ids: Sequence[int], wanted: int | None, spec: RunSpec) -> int:
        """How many tokens may follow: as asked, or what fits up to the default."""
        if wanted is not None and wanted < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="payload.max_tokens")
        room = self._window - len(ids)
        if room < (wanted or 1):
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens and {wanted or 1} shall follow; the window is {self._window}",
                param="payload.prompt" if spec.messages is None else "payload.messages",
                details={"need": len(ids) + (wanted or 1), "capacity": self._window, "unit": "tokens"},
            )
        if any(not 0 <= token < self._vocabulary for token in ids):
            raise InvalidRequest("the prompt has tokens outside the model's vocabulary", param="payload")
        default = int(spec.params.get("max_tokens", DEFAULT_MAX_TOKENS))  # of the model's entry, when it is there
        return wanted if wanted is not None else min(room, default)

    def _render(
        self, messages: Sequence[Message], plan: GuidancePlan | None, variables: Mapping[str, Any]
    ) -> list[int]:
        try:
            ids = self._guidance.render(messages, plan, variables)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            what, param = ("variables", "extra.chat_template_kwargs") if variables else ("messages", "payload.messages")
            raise InvalidRequest(
                shortened(f"the model's chat template fails with these {what}: {error}", 300), param=param
            ) from error
        except TemplateError as error:  # as templates say that roles do not alternate, or that they know no system role
            raise InvalidRequest(
                shortened(f"the model's chat template refuses these messages: {error}", 300), param="payload.messages"
            ) from error
        return ids if plan is None else [*ids, *plan.begun]

    def _first_id(self) -> int:
        bos = self._tokenizer.bos_token_id
        return int(bos if bos is not None else min(self._eos, default=0))

    def run(self, spec: RunSpec, prompt: Prompt) -> None:
        plan = prompt.plan
        if plan is None or plan.answers == 1:
            self._begin(self._run_of(spec, prompt, spec.run_id, 0, self._emit), prompt.published)
        else:
            choices = self._choices[spec.run_id] = Choices(spec.run_id, plan.answers, self._emit)
            for index, run_id in enumerate(choices.parts):
                self._begin(self._run_of(spec, prompt, run_id, index, choices.emit_of(index)))

    def _run_of(self, spec: RunSpec, prompt: Prompt, run_id: str, index: int, emit: Emit) -> TextRun:
        plan, ids = prompt.plan, prompt.ids
        # What a grammar ends, ends with a token of its own, even where other texts shall not end.
        guided = plan is not None and plan.matcher is not None
        ends = self._all_eos if guided else frozenset[int]() if prompt.options.ignore_eos else self._eos
        if plan is None:
            run = TextRun(spec, len(ids), self._detokeniser(), ends.__contains__, emit)
        else:
            run = self._planned(spec, prompt, plan, ends, run_id, index, emit)
        run.prompt, run.new_tokens, run.end_ids = ids, prompt.new_tokens, sorted(ends) or NO_END
        return run

    def _planned(
        self,
        spec: RunSpec,
        prompt: Prompt,
        plan: GuidancePlan,
        ends: frozenset[int],
        run_id: str,
        index: int,
        emit: Emit,
    ) -> TextRun:
        """Of a request that wants more than plain text."""
        control = plan.control(index, prompt.ids, sorted(ends))
        logprobs = None
        if control is not None and plan.options.top_logprobs is not None:
            logprobs = partial(self._guidance.logprobs, control)
        prompt_logprobs = None
        if control is not None and control.options.prompt_logprobs is not None:
            control.prompt_tokens = len(prompt.ids)
            prompt_logprobs = partial(self._guidance.prompt_logprobs, control, prompt.ids)
        run = TextRun(
            spec,
            len(prompt.ids),
            self._detokeniser(plan),
            ends.__contains__,
            emit,
            run_id=run_id,
            calls=plan.reader(f"{spec.request_id or spec.run_id}/{index}"),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        run.control, run.min_tokens = control, plan.options.min_tokens
        return run

    def _begin(self, run: TextRun, published: PublishedPrefix | None = None) -> None:
        self._runs[run.run_id] = run
        if published is not None and not run.go_on_from(published):
            self._fail(run.run_id, EngineFailed("the run cannot continue what was published"))
            return
        if published is not None and run.is_complete:
            self._advance(run, run.before, final=True)
            return
        self._batch.add(run.run_id)
        self._give_loop()

    def _give_loop(self) -> None:
        """What its batch has room for."""
        if not self._batch.fill():
            self._loop_died()

    def _put(self, run_id: str) -> bool:
        """Into the loop, from where it had come to; whether the loop took it."""
        run = self._runs[run_id]
        ids, left = [*run.prompt, *run.before], run.new_tokens - len(run.before)
        sampling = self._sampling(run.params)
        return self._batching.add(run_id, ids, left, sampling, run.end_ids, run.control, run.priority)

    def _detokeniser(self, plan: GuidancePlan | None = None) -> Detokeniser:
        decode = self._decode
        if plan is not None and plan.use.tools and plan.dialect.marker:
            decode = with_marker(self._tokenizer, plan.dialect.marker, decode)
        return Detokeniser(decode, context_free=self._context_free)

    def _end_ids(self) -> list[int]:
        return sorted(self._eos) or NO_END

    def _sampling(self, params: Mapping[str, Any]) -> Sampling:
        return sampling_of(params, vocabulary=self._vocabulary)

    def cancel(self, run_id: str) -> None:
        choices = self._choices.pop(run_id, None)
        for part in [run_id] if choices is None else choices.parts:
            if self._runs.pop(part, None) is not None:
                self._take_out(part)

    def _take_out(self, run_id: str, *, over: bool = False) -> None:
        """The next takes its place. `over`: the loop has ended it already."""
        self._batching.forget(run_id)
        if self._batch.remove(run_id) and not over:
            self._batching.cancel_request(run_id)
        self._give_loop()

    def check(self) -> None:
        """Notice a batching loop that ended, even one that ended without failing its runs."""
        if self._batching.dead:
            self._loop_died()
        self._tell_limits()

    def _tell_limits(self) -> None:
        """Also what the warm-up has found."""
        batch = self._batch
        if batch.ran_out or batch.changed:
            self._emit(("out_of_memory" if batch.ran_out else "limits", batch.slots))
            batch.ran_out = batch.changed = False

    def _loop_died(self) -> None:
        """Out of memory, its runs go on in smaller batches. Of all else the process dies too: the worker acts on that.

        A run that memory does not suffice for alone fails, and may be tried elsewhere.
        """
        if self._batching.out_of_memory:
            logger.warning("engine.out_of_memory runs=%d slots=%d", len(self._runs), self._batch.slots)
            for run in self._runs.values():
                run.rewind()
            for run_id in self._batch.begin_anew():
                self._fail(run_id, OutOfMemory("memory ran out in the smallest batch that the engine makes"))
            self._give_loop()
            self._tell_limits()
            return
        logger.error("engine.batching_loop_died runs=%d error=%s", len(self._runs), self._batching.reason)
        leave(1)

    def progress(self) -> int | None:
        return self._batching.turns

    def measured_memory(self) -> int:
        return self._meter.used_bytes()

    def peak_memory(self) -> int:
        return self._meter.peak_bytes()

    # -- tokens: the computing thread says that there are new ones, the event loop fetches them

    def _on_news(self, ended: bool) -> None:
        """In the computing thread, after each step. The end of a run makes room for others: it goes at once."""
        if ended or not self._will_look:
            self._will_look = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Take what is new. When there was something, look again a little later rather than after each step."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._will_look = False  # before looking: what comes from here on is either seen now or reported again
        if self._take_outputs() + self._take_tokens():
            self._will_look = True
            self._next_look = self._loop.call_later(LOOK_EVERY_S, self._look)

    def _take_outputs(self) -> int:
        outputs = self._batching.take_outputs()
        died = False
        for output in outputs:
            if output.error is not None:
                if self._batching.dead:
                    died = True
                    continue
                # Requests are validated before: what fails here without a reason of its own is the engine's fault.
                reason = output.error
                if not isinstance(reason, PenstockError):
                    reason = EngineFailed(shortened(f"the engine failed: {reason}", 300))
                self._fail(output.request_id, reason)
            elif (run := self._runs.get(output.request_id)) is not None:
                self._batch.went_well()
                self._advance(run, [*run.before, *output.generated_tokens], final=True)
        if died:
            self._loop_died()
        return len(outputs)

    def _take_tokens(self) -> int:
        news = 0
        for run in list(self._runs.values()):
            if run.wants_steps:
                ids = self._batching.generated(run.run_id)
                if ids is not None and len(run.before) + (count := len(ids)) > run.seen:
                    news += 1
                    self._advance(run, [*run.before, *ids[:count]], final=False)
        return news

    def _advance(self, run: TextRun, ids: Sequence[int], *, final: bool) -> None:
        try:
            run.take(ids, final=final)
            if final or run.stopped:
                del self._runs[run.run_id]
                run.reused_tokens = self._batching.reused_tokens(run.run_id)
                run.finish()
                self._forget_choices(run.run_id)
                self._take_out(run.run_id, over=final)
        except Exception as error:  # in a callback nobody hears it
            logger.exception("engine.output_failed")
            self._runs[run.run_id] = run
            self._fail(run.run_id, EngineFailed(f"{type(error).__name__} while the output was read"))

    def _fail(self, run_id: str, error: PenstockError) -> None:
        """One of several answers that fails takes the others along: they are one request."""
        if run_id not in self._runs:
            return
        whole = run_id.rpartition("#")[0]
        request_id = whole if whole in self._choices else run_id
        self.cancel(request_id)
        again = isinstance(error, EngineFailed)
        self._emit(("failed", RunFailed(run_id=request_id, error=error, retryable_here=again)))

    def _forget_choices(self, run_id: str) -> None:
        """Of a request whose last answer this was."""
        whole = run_id.rpartition("#")[0]
        choices = self._choices.get(whole)
        if choices is not None and not any(part in self._runs for part in choices.parts):
            del self._choices[whole]


def _folder_and_file(path: Path) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes: a folder, or a folder and the GGUF file in it."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


def _decoder(tokenizer: Any) -> tuple[Callable[[Sequence[int]], str], bool]:
    """Ids to text without special tokens, and whether a token's text is its own whatever is before it.

    The Rust tokenizer is asked directly: this runs for each token.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return (lambda ids: fast.decode(ids, skip_special_tokens=True)), type(fast.decoder).__name__ == "ByteLevel"
    return (lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)), False
