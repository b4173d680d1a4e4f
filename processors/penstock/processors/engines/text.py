"""Text generation inside the child: transformers' continuous batching behind a strict validator.

One bad request kills the batching loop with every stream in it, so each is validated here before it is added: token
ids, temperature, top_k, lengths against the cache. Stop strings are matched on the detokenised text.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from penstock.processors.core.context import build_context
from penstock.processors.core.stops import StopMatcher
from penstock.processors.engines.backend import Emit, leave
from penstock.processors.engines.base import EngineInfo, Finished, Message, Prepared, RunFailed, RunSpec
from penstock.processors.engines.detokenise import Detokeniser
from penstock.processors.engines.loading import (
    block_size,
    cache_tokens,
    device_name,
    dtype_name,
    limit_device_memory,
    measured_memory,
)
from penstock.processors.engines.sampling import GREEDY, Sampling, sampling_of
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 512
WARM_UP_S = 120


class TextBackend:
    """One causal language model in continuous batching."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._block = block_size(options)
        self._cache_tokens = cache_tokens(options)
        self._runs: dict[str, _Run] = {}
        self._model: Any = None
        self._manager: Any = None
        self._tokenizer: Any = None
        self._decode: Callable[[Sequence[int]], str] = lambda ids: ""
        self._context_free = False
        self._eos: frozenset[int] = frozenset()
        self._vocabulary = 0
        self._window = 0

    # -- loading

    def load(self) -> EngineInfo:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        torch.set_num_threads(int(self._options.get("threads", 1)))
        disable_progress_bar()
        folder, extra = _folder_and_file(Path(self._source))
        device = device_name(self._options)
        limit_device_memory(self._options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
        dtype = getattr(torch, dtype_name(self._options))
        # Weights come from safetensors (or GGUF) alone: a pickle is never opened.
        safe: dict[str, Any] = extra or {"use_safetensors": True}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **safe)
        self._model = model.to(device).eval()
        self._model.set_attn_implementation(f"paged|{self._options.get('attention', 'sdpa')}")
        config: Any = self._model.config.get_text_config()
        self._vocabulary = int(config.vocab_size)
        if not self._options.get("ignore_eos", False):  # for benchmarks, which want answers of one length
            self._eos = _eos_ids(self._model.generation_config, self._tokenizer)
        self._decode, self._context_free = _decoder(self._tokenizer)
        # One block is left out: a prompt with its answer must never fill the whole cache.
        longest = int(getattr(config, "max_position_embeddings", 0) or self._cache_tokens)
        self._window = min(longest, self._cache_tokens - self._block, int(self._options.get("window", 1 << 30)))
        if self._window < 2:
            raise InvalidRequest(f"a cache of {self._cache_tokens} tokens is too small for any prompt")
        self._start_manager()
        self._warm_up()
        return EngineInfo(context_window=self._window, max_output_tokens=self._window - 1, device=device)

    def _start_manager(self) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        for name in ("ContinuousBatchingLogger", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Base values other than the defaults make the per-request processors exist at all.
        base = GenerationConfig(
            do_sample=True,
            temperature=0.9,
            top_k=50,
            top_p=0.95,
            max_new_tokens=DEFAULT_MAX_TOKENS,
            eos_token_id=self._end_ids(),
            pad_token_id=self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0,
        )
        on_cpu = device_name(self._options) == "cpu"
        config = ContinuousBatchingConfig(
            block_size=self._block,
            num_blocks=self._cache_tokens // self._block,
            max_batch_tokens=int(self._options.get("max_batch_tokens", 512)),
            max_requests_per_batch=int(self._options.get("slots", 64)),
            per_request_processors=True,
            use_cuda_graph=False if on_cpu else None,
            use_async_batching=False if on_cpu else None,
            # Admission has reserved a run's whole length before it comes here: no prompt need wait for a margin.
            safety_margin=0.0,
        )
        self._manager = self._model.init_continuous_batching(generation_config=base, continuous_batching_config=config)
        self._manager.start()

    def _warm_up(self) -> None:
        """One token, so that "ready" means that the loop really runs. Raises EngineFailed with the loop's error."""
        self._add("warm-up", [self._first_id()], 1, GREEDY, streaming=False)
        give_up = time.monotonic() + WARM_UP_S
        while time.monotonic() < give_up:
            result = self._manager.get_result(timeout=0.5)
            if result is not None and result.is_finished() and result.error is None:
                # Every run has a handler from here on; what a cancelled one still delivers must not pile up.
                self._manager.output_router.output_queue = _Nowhere()
                return
            if result is not None or not self._manager.is_running():
                break
        reason = self._manager.background_thread_status.fatal_error
        raise EngineFailed(f"the batching loop does not run: {reason!r}"[:500])

    # -- preparing

    def prepare(self, spec: RunSpec) -> tuple[Prepared, tuple[list[int], int]]:
        """Tokens of the prompt, and of the cache in all; the prompt is its ids and how many may follow.

        Raises ContextLengthExceeded, InvalidRequest, UnsupportedParameter.
        """
        self._sampling(spec.params)
        wanted = spec.params.get("max_tokens")
        reserve = min(int(wanted), self._window - 1) if wanted is not None else min(64, self._window // 4)
        messages: list[Message] | None = None
        dropped = 0
        if spec.messages is not None:
            rendered: dict[int, list[int]] = {}  # by how many messages: one history is cut at different lengths

            def count(chosen: Sequence[Message]) -> int:
                ids = rendered[len(chosen)] = self._render(chosen)
                return len(ids)

            context = build_context(
                spec.history or [],
                spec.messages,
                window_tokens=self._window,
                max_output_tokens=reserve,
                limits=spec.context,
                count=count,
            )
            messages, dropped = context.messages, context.dropped_turns
            ids = rendered[len(messages)]
        else:
            ids = self._tokenizer(spec.prompt or "", add_special_tokens=True)["input_ids"] or [self._first_id()]
        new_tokens = self._fit(ids, int(wanted) if wanted is not None else None, spec)
        prepared = Prepared(
            run_id=spec.run_id,
            prompt_tokens=len(ids),
            need_tokens=-(-(len(ids) + new_tokens) // self._block) * self._block,
            context_messages=len(messages or ()),
            dropped_turns=dropped,
        )
        return prepared, (ids, new_tokens)

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
        default = int(self._options.get("default_max_tokens", DEFAULT_MAX_TOKENS))
        return wanted if wanted is not None else min(room, default)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        if self._tokenizer.chat_template is None:
            text = "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
            return self._tokenizer(text)["input_ids"]
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except TemplateError as error:  # as templates say that roles do not alternate, or that they know no system role
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}"[:300], param="payload.messages"
            ) from error
        return list(rendered["input_ids"])

    def _first_id(self) -> int:
        bos = self._tokenizer.bos_token_id
        return int(bos if bos is not None else min(self._eos, default=0))

    # -- running

    def run(self, spec: RunSpec, prompt: tuple[list[int], int]) -> None:
        ids, new_tokens = prompt
        self.check()
        run = _Run(self, spec, len(ids))
        self._runs[spec.run_id] = run
        self._manager.register_result_handler(spec.run_id, run.on_output)
        if not self._add(spec.run_id, ids, new_tokens, self._sampling(spec.params), streaming=run.wants_steps):
            self._loop_died()

    def _add(self, run_id: str, ids: list[int], new_tokens: int, sampling: Sampling, *, streaming: bool) -> bool:
        """Whether the loop took it; it takes nothing once it has died."""
        added = self._manager.add_request(
            ids,
            request_id=run_id,
            max_new_tokens=new_tokens,
            streaming=streaming,
            eos_token_id=self._end_ids(),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        return added is not None

    def _end_ids(self) -> list[int]:
        return sorted(self._eos) or [-1]

    def _sampling(self, params: Mapping[str, Any]) -> Sampling:
        defaults = {name: self._options[name] for name in ("temperature", "top_p", "top_k") if name in self._options}
        return sampling_of({**defaults, **params}, vocabulary=self._vocabulary)

    def check(self) -> None:
        """Notice a batching loop that ended, even one that ended without failing its runs."""
        if not self._manager.is_running():
            self._loop_died()

    def _loop_died(self) -> None:
        """The batching loop is gone: all its runs fail (and run again), and it is started anew."""
        reason = self._manager.background_thread_status.fatal_error
        logger.error("engine.batching_loop_died runs=%d error=%r", len(self._runs), reason)
        if device_name(self._options) != "cpu":
            leave(1)  # after an error on a card its memory and context are not to be trusted: a new process
        for run in list(self._runs.values()):
            run.fail(EngineFailed("the batching loop died"))
        self._manager.stop(block=True, timeout=5)
        self._manager.destroy()
        self._start_manager()
        self._manager.output_router.output_queue = _Nowhere()

    def cancel(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is not None:
            self.let_go(run_id)

    def let_go(self, run_id: str) -> None:
        """Stop a run in the manager. It delivers nothing for a cancelled one, so its handler is removed here."""
        self._manager.cancel_request(run_id)
        with self._manager.output_router._lock:
            self._manager.output_router.result_handlers.pop(run_id, None)

    def progress(self) -> int | None:
        return self._manager.current_batch if self._runs else None

    def measured_memory(self) -> int:
        return measured_memory(device_name(self._options))

    # -- what runs use

    def emit(self, event: tuple[Any, ...]) -> None:
        self._emit(event)

    def ended(self, run_id: str) -> bool:
        """Whether the run was known and is forgotten now."""
        return self._runs.pop(run_id, None) is not None

    def detokeniser(self) -> Detokeniser:
        return Detokeniser(self._decode, context_free=self._context_free)

    def is_end(self, token: int) -> bool:
        return token in self._eos


class _Run:
    """One run's stream: cumulative tokens in, text deltas out."""

    def __init__(self, backend: TextBackend, spec: RunSpec, prompt_tokens: int) -> None:
        self._backend = backend
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._matcher = StopMatcher(spec.params.get("stop") or ())
        self._detokeniser = backend.detokeniser()
        self._text: list[str] = []
        self._ids: list[int] = []
        self._told = 0

    @property
    def wants_steps(self) -> bool:
        """Whether each token must be looked at; else the whole comes at the end, for less work."""
        return self._spec.stream or bool(self._spec.params.get("stop"))

    def on_output(self, output: Any) -> None:
        """Called on the loop for each step, with all tokens so far."""
        try:
            self._take(output)
        except Exception as error:  # in a callback nobody hears it
            logger.exception("engine.output_failed")
            self._backend.let_go(self._spec.run_id)
            self.fail(EngineFailed(f"{type(error).__name__} while the output was read"))

    def _take(self, output: Any) -> None:
        run_id = self._spec.run_id
        if output.error is not None:
            # Requests are validated before: what fails here is the engine, mostly its whole loop.
            self.fail(EngineFailed(f"the engine failed: {output.error}"[:300]))
            return
        finished = output.is_finished()
        if len(output.generated_tokens) > len(self._ids) or finished:
            self._ids = output.generated_tokens
            text = self._matcher.feed(self._detokeniser.feed(self._ids, final=finished))
            if finished and not self._matcher.stopped:
                text += self._matcher.flush()
            self._tell(text)
        if self._matcher.stopped and not finished:
            self._backend.let_go(run_id)
        if (finished or self._matcher.stopped) and self._backend.ended(run_id):
            self._backend.emit(("finished", self._finished()))

    def _tell(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        if self._spec.stream:
            self._backend.emit(("delta", self._spec.run_id, text, self._ids[self._told :], self._told))
        self._told = len(self._ids)

    def _finished(self) -> Finished:
        made = len(self._ids)
        at_end = self._matcher.stopped or (made > 0 and self._backend.is_end(self._ids[-1]))
        return Finished(
            run_id=self._spec.run_id,
            output={"text": "".join(self._text)},
            finish_reason="stop" if at_end else "length",
            usage={
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": made,
                "total_tokens": self._prompt_tokens + made,
            },
            prompt_tokens=self._prompt_tokens,
            completion_tokens=made,
        )

    def fail(self, error: EngineFailed) -> None:
        if self._backend.ended(self._spec.run_id):
            failed = RunFailed(run_id=self._spec.run_id, error=error, retryable_here=True)
            self._backend.emit(("failed", failed))


class _Nowhere(queue.SimpleQueue[Any]):
    """The manager's queue for results without a handler: nobody reads it, so nothing stays in it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        pass


def _folder_and_file(path: Path) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes: a folder, or a folder and the GGUF file in it."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


def _decoder(tokenizer: Any) -> tuple[Callable[[Sequence[int]], str], bool]:
    """Ids to text without special tokens, and whether a token's text is its own whatever stands before it.

    The Rust tokenizer is asked directly: this runs for each token.
    """
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return (lambda ids: fast.decode(ids, skip_special_tokens=True)), type(fast.decoder).__name__ == "ByteLevel"
    return (lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)), False


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: the model's and the tokenizer's."""
    found = getattr(generation_config, "eos_token_id", None)
    ids: list[int | None] = [*found] if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
