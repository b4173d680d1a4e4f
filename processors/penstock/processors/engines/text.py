"""Text generation inside the child: transformers' continuous batching behind a strict validator.

One bad request kills the batching loop with every stream in it, so each is validated here before it is added: token
ids, temperature, top_k, lengths against the cache. Stop strings are matched on the detokenised text.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.processors.core.context import build_context
from penstock.processors.core.stops import StopMatcher
from penstock.processors.engines.base import Delta, EngineInfo, Finished, Message, Prepared, RunFailed, RunSpec
from penstock.processors.engines.child import Emit
from penstock.processors.engines.loading import (
    block_size,
    cache_tokens,
    device_name,
    dtype_name,
    resolve_source,
)
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, UnsupportedParameter

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 512
REMEMBERED_PROMPTS = 1024


class TextBackend:
    """One causal language model in continuous batching."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._block = block_size(options)
        self._cache_tokens = cache_tokens(options)
        self._prompts: OrderedDict[str, tuple[list[int], int]] = OrderedDict()
        self._runs: dict[str, _Run] = {}
        self._model: Any = None
        self._manager: Any = None
        self._tokenizer: Any = None
        self._eos: frozenset[int] = frozenset()
        self._vocabulary = 0
        self._window = 0
        self._loop = asyncio.get_running_loop()

    # -- loading

    def load(self) -> EngineInfo:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(int(self._options.get("threads", 2)))
        path = resolve_source(self._source)
        folder, extra = _folder_and_file(path)
        device = device_name(self._options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
        dtype = getattr(torch, dtype_name(self._options))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra)
        self._model = model.to(device).eval()
        self._model.set_attn_implementation(self._options.get("attention", "sdpa"))
        config: Any = self._model.config
        self._vocabulary = int(config.vocab_size)
        self._eos = _eos_ids(self._model.generation_config, self._tokenizer)
        # One block is left out: a prompt with its answer must never fill the whole cache.
        longest = int(getattr(config, "max_position_embeddings", 0) or self._cache_tokens)
        self._window = min(longest, self._cache_tokens - self._block, int(self._options.get("window", 1 << 30)))
        self._start_manager()
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
            eos_token_id=sorted(self._eos),
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
        )
        self._manager = self._model.init_continuous_batching(generation_config=base, continuous_batching_config=config)
        self._manager.start()

    # -- preparing

    def prepare(self, spec: RunSpec) -> Prepared:
        """Tokens of the prompt, and of the cache in all. Raises ContextLengthExceeded, UnsupportedParameter."""
        self._check_sampling(spec.params)
        wanted = spec.params.get("max_tokens")
        reserve = min(int(wanted), self._window - 1) if wanted is not None else min(64, self._window // 4)
        messages: list[Message] | None = None
        dropped = 0
        if spec.messages is not None:
            context = build_context(
                spec.history or [],
                spec.messages,
                window_tokens=self._window,
                max_output_tokens=reserve,
                limits=spec.context,
                count=lambda chosen: len(self._render(chosen)),
            )
            messages, dropped = context.messages, context.dropped_turns
            ids = self._render(messages)
        else:
            ids = self._tokenizer(spec.prompt or "", add_special_tokens=True)["input_ids"] or [self._first_id()]
        new_tokens = self._fit(ids, int(wanted) if wanted is not None else None)
        self._remember(spec.run_id, ids, new_tokens)
        return Prepared(
            run_id=spec.run_id,
            prompt_tokens=len(ids),
            need_tokens=-(-(len(ids) + new_tokens) // self._block) * self._block,
            context_messages=len(messages or ()),
            dropped_turns=dropped,
        )

    def _fit(self, ids: Sequence[int], wanted: int | None) -> int:
        """How many tokens may follow: as asked, or what fits up to the default."""
        room = self._window - len(ids)
        if room < 1 or (wanted is not None and wanted > room):
            need = len(ids) + (wanted or 1)
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens and max_tokens is {wanted or 1}; the window is {self._window}",
                param="payload.messages",
                details={"need": need, "capacity": self._window, "unit": "tokens"},
            )
        if any(not 0 <= token < self._vocabulary for token in ids):
            raise InvalidRequest("the prompt has tokens outside the model's vocabulary", param="payload")
        default = int(self._options.get("default_max_tokens", DEFAULT_MAX_TOKENS))
        return wanted if wanted is not None else min(room, default)

    @staticmethod
    def _check_sampling(params: Mapping[str, Any]) -> None:
        if params.get("seed") is not None and float(params.get("temperature", 1.0)) > 0:
            raise UnsupportedParameter(
                "seed is not supported with temperature above 0: requests share a batch and its random numbers",
                param="payload.seed",
            )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        if self._tokenizer.chat_template is None:
            text = "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
            return self._tokenizer(text)["input_ids"]
        rendered = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(rendered["input_ids"])

    def _first_id(self) -> int:
        bos = self._tokenizer.bos_token_id
        return int(bos if bos is not None else min(self._eos, default=0))

    def _remember(self, run_id: str, ids: list[int], new_tokens: int) -> None:
        self._prompts[run_id] = (ids, new_tokens)
        if len(self._prompts) > REMEMBERED_PROMPTS:
            self._prompts.popitem(last=False)

    # -- running

    def run(self, spec: RunSpec) -> None:
        if spec.run_id not in self._prompts:
            self.prepare(spec)
        ids, new_tokens = self._prompts.pop(spec.run_id)
        if not self._manager.is_running():
            self._loop_died()
        run = _Run(self, spec, len(ids))
        self._runs[spec.run_id] = run
        self._manager.register_result_handler(spec.run_id, run.on_output)
        added = self._manager.add_request(
            ids,
            request_id=spec.run_id,
            max_new_tokens=new_tokens,
            streaming=True,
            eos_token_id=sorted(self._eos) or [-1],
            **self._sampling(spec.params),
        )
        if added is None:
            self._loop_died()

    def _sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        temperature = float(params.get("temperature", self._options.get("temperature", 1.0)))
        if temperature < 0.01:  # greedy: zero itself would divide by it
            return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
        top_k = int(params.get("top_k", self._vocabulary))
        return {
            "temperature": temperature,
            "top_k": max(1, min(top_k, self._vocabulary)),
            "top_p": float(params.get("top_p", 1.0)),
        }

    def _loop_died(self) -> None:
        """The batching loop is gone: all its runs fail (and run again), and it is started anew."""
        logger.error("engine.batching_loop_died runs=%d", len(self._runs))
        for run in list(self._runs.values()):
            run.fail(EngineFailed("the batching loop died"), again=True)
        self._manager.stop(block=True, timeout=5)
        self._manager.destroy()
        self._start_manager()

    def cancel(self, run_id: str) -> None:
        self._prompts.pop(run_id, None)
        if self._runs.pop(run_id, None) is not None:
            self.let_go(run_id)

    def let_go(self, run_id: str) -> None:
        """Stop a run in the manager. It delivers nothing for a cancelled one, so its handler is removed here."""
        self._manager.cancel_request(run_id)
        with self._manager.output_router._lock:
            self._manager.output_router.result_handlers.pop(run_id, None)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=False)

    # -- what runs use

    def emit(self, event: tuple[Any, ...]) -> None:
        self._emit(event)

    def ended(self, run_id: str) -> bool:
        """Whether the run was known and is forgotten now."""
        return self._runs.pop(run_id, None) is not None

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def is_end(self, token: int) -> bool:
        return token in self._eos


class _Run:
    """One run's stream: cumulative tokens in, text deltas out.

    Detokenising follows the usual two offsets (as vLLM and TGI do): text is taken only when it does not end in half a
    character, and always relative to a prefix, so that the deltas concatenate to the whole.
    """

    def __init__(self, backend: TextBackend, spec: RunSpec, prompt_tokens: int) -> None:
        self._backend = backend
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._matcher = StopMatcher(spec.params.get("stop") or ())
        self._text: list[str] = []
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._told = 0

    def on_output(self, output: Any) -> None:
        """Called on the loop for each step, with all tokens so far."""
        run_id = self._spec.run_id
        if output.error is not None:
            self.fail(EngineFailed(f"the engine refused the run: {output.error}"), again=False)
            return
        finished = output.is_finished()
        if len(output.generated_tokens) > len(self._ids) or finished:
            self._ids = list(output.generated_tokens)
            text = self._matcher.feed(self._new_text(final=finished))
            if finished and not self._matcher.stopped:
                text += self._matcher.flush()
            self._tell(text)
        if self._matcher.stopped and not finished:
            self._backend.let_go(run_id)
        if (finished or self._matcher.stopped) and self._backend.ended(run_id):
            self._backend.emit(("finished", self._finished()))

    def _new_text(self, *, final: bool) -> str:
        prefix = self._backend.decode(self._ids[self._prefix : self._read])
        whole = self._backend.decode(self._ids[self._prefix :])
        if not final and (whole.endswith("\ufffd") or len(whole) <= len(prefix)):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(prefix) :]

    def _tell(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        if self._spec.stream:
            ids = self._ids[self._told :]
            delta = Delta(run_id=self._spec.run_id, text=text, token_ids=ids, first_token_index=self._told)
            self._backend.emit(("delta", delta))
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

    def fail(self, error: EngineFailed, *, again: bool) -> None:
        if self._backend.ended(self._spec.run_id):
            failed = RunFailed(run_id=self._spec.run_id, error=error, retryable_here=again)
            self._backend.emit(("failed", failed))


def _folder_and_file(path: Path) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes: a folder, or a folder and the GGUF file in it."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: the model's and the tokenizer's."""
    found = getattr(generation_config, "eos_token_id", None)
    ids: list[int | None] = [*found] if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
