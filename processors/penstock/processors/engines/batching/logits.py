"""Per-request control of logits inside transformers' continuous batching. Imported in an engine's process only.

The loop samples in its model runner, which knows the logits of a batch but not whose they are. Their owners are in
the batch's inputs and outputs. `ControlledRunner` brings the two together: it works on the rows of those requests that
have a `Control`, before and after the loop's own processors, and samples them again when they have a seed. A batch
without such requests takes the loop's own way, with CUDA graphs where there are any. One run's failure is its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from llguidance import LLExecutor
from transformers.generation.continuous_batching.model_runner import ModelRunner

from penstock.processors.engines.batching.controls import Control, Logprob
from penstock.processors.engines.batching.prompt_logits import HiddenStates, PromptPart, parts_of
from penstock.schemas.errors import EngineFailed, PenstockError

logger = logging.getLogger(__name__)

Row = tuple[int, Control]
Fail = Callable[[str, PenstockError], None]


class ControlledRunner(ModelRunner):
    """Runs the model as the loop's own runner does. `fail(run_id, error)` ends one run."""

    def __init__(self, runner: ModelRunner, controls: dict[str, Control], fail: Fail, *, threads: int) -> None:
        super().__init__(
            logit_processor=runner.logit_processor,
            cb_config=runner.cb_config,
            inputs_and_outputs=runner.inputs_and_outputs,
            cache=runner.cache,
            do_sample=runner.do_sample,
            return_logprobs=runner.return_logprobs,
        )
        self._controls = controls
        self._fail = fail
        self._rows: list[Row] = []
        self._parts: list[PromptPart] = []
        self._raw: torch.Tensor | None = None
        self._masks = Masks(threads)
        self.logit_processor = _Around(runner.logit_processor, self)

    @property
    def rows(self) -> list[Row]:
        """Those of the batch that is computed which have a control."""
        return self._rows

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        futures = self._futures() if self._controls else []
        self._rows = self._controlled(futures)
        self._parts = parts_of(futures, self._controls)
        super().compute_batch(model, batch_data)

    def _futures(self) -> list[Any]:
        """The requests of the step, in the order of their tokens."""
        ios: Any = self.inputs_and_outputs
        if hasattr(ios, "io_pairs"):  # asynchronous batching has two of them
            ios = ios.io_pairs[ios.current_pair].host_io
        return ios.requests_in_batch

    def _controlled(self, futures: list[Any]) -> list[Row]:
        """The rows of logits that belong to requests with a control."""
        states = [future.state for future in futures if future.has_new_token]
        rows: list[Row] = []
        for row, state in enumerate(states):
            control = self._controls.get(state.request_id)
            if control is not None:
                if control.state is not state:
                    control.state = state
                    control.set_back(_made(state))
                rows.append((row, control))
        return rows

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        if self._parts:
            return self._forward_with_prompts, False
        if self._rows:  # what is done to these rows is no part of a graph
            return self._forward_process_and_sample, False
        return super()._get_forward_fn(use_block_table)

    def _forward_with_prompts(self, model: Any, batch_data: dict[str, Any], *arguments: Any) -> None:
        """The loop's own step, then the log probabilities of prompts from the same hidden states."""
        hidden = HiddenStates(model)
        with hidden.kept():
            self._forward_process_and_sample(model, batch_data, *arguments)
        hidden.keep_logprobs(self._parts, batch_data)

    # -- around the loop's own processors: scores are [rows, vocabulary], float32

    def before(self, scores: torch.Tensor) -> torch.Tensor:
        """Keep what the model gave, then penalties, bias and masks."""
        wanted = [row for row, control in self._rows if control.options.top_logprobs is not None]
        self._raw = torch.log_softmax(scores[wanted], dim=-1) if wanted else None
        for row, control in self._rows:
            if control.repeats:
                _scale(scores, row, control)
            if control.counts or control.options.bias:
                _shift(scores, row, control)
            if control.holds_end and control.matcher is None:
                scores[row, torch.tensor(control.end_ids, device=scores.device)] = -math.inf
        guided = [(row, control) for row, control in self._rows if control.matcher is not None]
        if guided:
            self._mask(scores, guided)
        return scores

    def _mask(self, scores: torch.Tensor, guided: list[Row]) -> None:
        try:
            allowed = self._masks.allowed([control.matcher for _, control in guided], scores.size(-1))
        except Exception as error:
            logger.exception("engine.mask_failed")
            for _, control in guided:
                self._end(control, EngineFailed(f"{type(error).__name__} while the grammar was followed"))
            return
        some = allowed.any(axis=1)
        for place, (_, control) in enumerate(guided):
            failure = control.failure() or (None if some.item(place) else EngineFailed("the grammar allows no token"))
            if failure is not None:
                self._end(control, failure)
                allowed[place] = True  # a row without any token would end the loop
            elif control.holds_end:
                _hold_end(allowed[place], control)
        rows = torch.tensor([row for row, _ in guided], device=scores.device)
        banned = torch.from_numpy(~allowed).to(scores.device)
        scores[rows] = scores[rows].masked_fill_(banned, -math.inf)

    def after(self, scores: torch.Tensor) -> torch.Tensor:
        """min_p, of what is left after temperature, top_k and top_p."""
        for row, control in self._rows:
            if control.options.min_p > 0:
                least = scores[row].max() + math.log(control.options.min_p)
                scores[row] = scores[row].masked_fill(scores[row] < least, -math.inf)
        return scores

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        super()._sample(scores, output_ids)
        if not self._rows:
            return
        for row, control in self._rows:
            number = control.draw()
            if number is not None:
                output_ids[0, row] = _sampled(scores[0, row], number)
        tokens: list[int] = output_ids[0].tolist()
        if self._raw is not None:
            self._keep_logprobs(self._raw, tokens)
            self._raw = None
        for row, control in self._rows:
            if (failure := control.take(tokens[row])) is not None:
                self._end(control, failure)

    def _keep_logprobs(self, raw: torch.Tensor, tokens: list[int]) -> None:
        rows = [(row, control) for row, control in self._rows if control.options.top_logprobs is not None]
        chosen = raw[torch.arange(len(rows)), [tokens[row] for row, _ in rows]].tolist()
        most = max(control.options.top_logprobs or 0 for _, control in rows)
        values, ids = raw.topk(most, dim=-1) if most else (raw[:, :0], raw[:, :0])
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        for place, (row, control) in enumerate(rows):
            top = tuple(tops[place][: control.options.top_logprobs])
            control.logprobs.append(Logprob(tokens[row], chosen[place], top))

    def _end(self, control: Control, error: PenstockError) -> None:
        self._fail(control.state.request_id, error)


class _Around:
    """The loop's list of processors with those of the runner around it."""

    do_processing = True

    def __init__(self, inner: Any, runner: ControlledRunner) -> None:
        self._inner, self._runner = inner, runner

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, arguments: torch.Tensor) -> torch.Tensor:
        controlled = bool(self._runner.rows)
        if controlled:
            scores = self._runner.before(scores)
        if self._inner.do_processing:
            scores = self._inner(input_ids, scores, arguments)
        return self._runner.after(scores) if controlled else scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Masks:
    """Which tokens grammars allow, computed in Rust, several at once."""

    def __init__(self, threads: int) -> None:
        self._executor = LLExecutor(num_threads=max(1, threads))
        self._bits = numpy.zeros((0, 0), dtype=numpy.int32)

    def allowed(self, matchers: list[Any], vocabulary: int) -> Any:
        """[matchers, vocabulary], true for what is allowed."""
        words = -(-vocabulary // 32)
        if self._bits.shape[0] < len(matchers) or self._bits.shape[1] != words:
            self._bits = numpy.zeros((len(matchers), words), dtype=numpy.int32)
        bits = self._bits[: len(matchers)]
        bits.fill(0)
        pairs = [(matcher, place) for place, matcher in enumerate(matchers) if not matcher.is_error()]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, words * 4, len(matchers))
        return numpy.unpackbits(bits.view(numpy.uint8), axis=1, bitorder="little")[:, :vocabulary].astype(bool)


def _made(state: Any) -> int:
    """How many tokens of a run the loop holds for made."""
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return before + len(state.generated_tokens)


def _hold_end(allowed: Any, control: Control) -> None:
    """The run must not end yet, unless its grammar allows nothing else."""
    ends = [token for token in control.end_ids if allowed[token]]
    allowed[ends] = False
    if not allowed.any():
        allowed[ends] = True


def _scale(scores: torch.Tensor, row: int, control: Control) -> None:
    """The repetition penalty, for each token of the prompt and of the text so far."""
    ids = torch.tensor([*control.prompt | control.counts.keys()], device=scores.device)
    values, penalty = scores[row, ids], control.options.repetition_penalty
    scores[row, ids] = torch.where(values > 0, values / penalty, values * penalty)


def _shift(scores: torch.Tensor, row: int, control: Control) -> None:
    """Penalties for the tokens so far, and the bias."""
    options = control.options
    shifts = dict(options.bias)
    for token, count in control.counts.items():
        shifts[token] = shifts.get(token, 0.0) - options.presence_penalty - options.frequency_penalty * count
    ids = torch.tensor(list(shifts), device=scores.device)
    scores[row, ids] += torch.tensor(list(shifts.values()), dtype=scores.dtype, device=scores.device)


def _sampled(scores: torch.Tensor, number: float) -> torch.Tensor:
    """The token that a number from 0 to 1 stands for, by the cumulated probabilities. One without any is never it."""
    sums = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    return (sums <= number * sums[-1]).sum().clamp(max=scores.size(-1) - 1)
