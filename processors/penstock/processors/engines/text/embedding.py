"""Embeddings inside the child: mean pooling over AutoModel, normalised; requests that come together share batches.

Batch after batch is computed in a thread of its own, so that more texts gather while one is computed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec, refuse_unsupported
from penstock.processors.engines.batching.length_batches import LengthBatches
from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.process.loading import device_name, limit_device_memory, padded_tokens
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.engines.process.out_of_memory import free_caches, is_out_of_memory
from penstock.processors.engines.process.weights import code_option, load_weights
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest

logger = logging.getLogger(__name__)

Text = tuple[str, int]
"""(run id, place in the run's inputs)"""
Batched = tuple[str, int, list[int]]
"""The same with the text's tokens."""


Vector = list[float]

LEAST_TOKENS = 32
"""Of a batch: smaller ones would only be slow."""
LONG_ENOUGH_S = 5.0
"""A batch that takes longer is the last of the warm-up."""


class _Run:
    """A run's texts as token ids, and the vectors found so far."""

    def __init__(self, spec: RunSpec, ids: list[list[int]]) -> None:
        self.spec = spec
        self.ids = ids
        self.vectors: list[list[float]] = [[]] * len(ids)
        self.missing = len(ids)


class EmbeddingBackend:
    """One encoder model."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._limit = BatchLimit(padded_tokens(options), LEAST_TOKENS)
        self._meter = Meter(device_name(options))
        self._ran_out = False
        """Memory ran out, and the worker was not told yet."""
        self._runs: dict[str, _Run] = {}
        self._waiting: LengthBatches[Text] = LengthBatches()
        self._batches: queue.SimpleQueue[list[Batched]] = queue.SimpleQueue()
        self._under_way = 0
        """Batches that are computed, or wait for that."""
        self._computed = 0
        self._loop = asyncio.get_running_loop()
        self._model: Any = None
        self._tokenizer: Any = None
        self._window = 0
        self._dimensions = 0
        self._vocabulary = 0

    def load(self) -> EngineInfo:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        torch.set_num_threads(int(self._options.get("threads", 1)))
        disable_progress_bar()
        folder = self._source
        device = device_name(self._options)
        limit_device_memory(self._options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **code_option(self._options))
        self._model = load_weights(AutoModel, folder, self._options)
        config: Any = self._model.config
        self._window = min(int(config.max_position_embeddings), int(self._options.get("window", 1 << 30)))
        self._dimensions = int(config.hidden_size)
        self._first_id = self._tokenize(["warm up"])[0][0]
        self._vocabulary = int(config.vocab_size)
        self._forward([self._tokenize(["warm up"])[0]])
        threading.Thread(target=self._compute, name="compute", daemon=True).start()
        return EngineInfo(context_window=self._window, dimensions=self._dimensions, device=device)

    def warm_up(self) -> None:
        """The largest batch, after smaller ones: texts as long as the window. Raises OutOfMemory when none fits."""
        for share in (8, 2, 1):
            began = time.monotonic()
            while True:
                length = max(1, self._window // share)
                texts = max(1, self._limit.size // length)
                results = self._forward_within_memory([[self._first_id] * length] * texts)
                if not self._ran_out or texts * length <= self._limit.size or texts == 1:
                    break
            if texts == 1 and isinstance(results[0], Exception):
                raise results[0]
            if time.monotonic() - began > LONG_ENOUGH_S:
                return

    def prepare(self, spec: RunSpec) -> tuple[Prepared, list[list[int]]]:
        """Raises ContextLengthExceeded for a text that is too long, InvalidRequest for too many dimensions."""
        refuse_unsupported(spec, "embedding")
        wanted = spec.params.get("dimensions")
        if wanted is not None and not 1 <= int(wanted) <= self._dimensions:
            raise InvalidRequest(
                f"dimensions must be from 1 to {self._dimensions} for this model", param="payload.dimensions"
            )
        given: list[list[int]] | None = spec.params.get("input_token_ids")
        if not spec.inputs and not given:
            raise InvalidRequest("there is no text to embed", param="payload.input")
        ids = self._tokenize(spec.inputs or []) if given is None else self._checked(given)
        for number, tokens in enumerate(ids):
            if len(tokens) > self._window:
                raise ContextLengthExceeded(
                    f"input {number} has {len(tokens)} tokens; the model takes {self._window}",
                    param=f"payload.input[{number}]",
                    details={"need": len(tokens), "capacity": self._window, "unit": "tokens"},
                )
        return Prepared(run_id=spec.run_id, prompt_tokens=sum(map(len, ids)), need_tokens=0), ids

    def _checked(self, given: list[list[int]]) -> list[list[int]]:
        """Tokens of the caller's own, taken as they are. Raises InvalidRequest for one that the model has not."""
        for number, tokens in enumerate(given):
            if not tokens or not all(0 <= token < self._vocabulary for token in tokens):
                raise InvalidRequest(
                    f"input_token_ids[{number}] must be tokens from 0 to {self._vocabulary - 1}, at least one",
                    param=f"payload.input_token_ids[{number}]",
                )
        return given

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(list(texts), verbose=False)["input_ids"]

    def run(self, spec: RunSpec, prompt: list[list[int]]) -> None:
        self._runs[spec.run_id] = _Run(spec, prompt)
        for place, ids in enumerate(prompt):
            self._waiting.add((spec.run_id, place), len(ids))
        self._begin_batches()

    def cancel(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is not None:
            self._waiting.drop(lambda text: text[0] == run_id)

    def check(self) -> None:
        if self._ran_out:
            self._ran_out = False
            self._emit(("out_of_memory", None))

    def progress(self) -> int | None:
        return self._computed if self._under_way else None

    def measured_memory(self) -> int:
        return self._meter.used_bytes()

    def peak_memory(self) -> int:
        return self._meter.peak_bytes()

    def _begin_batches(self) -> None:
        """One is computed. A full one waits behind it, so that the computing thread does not; others still gather."""
        most = self._limit.size
        while self._waiting and (not self._under_way or (self._under_way == 1 and self._waiting.fills(most))):
            self._under_way += 1
            batch = self._waiting.take(most)
            self._batches.put([(run, place, self._runs[run].ids[place]) for run, place in batch])

    def _compute(self) -> None:
        """The thread that computes, for ever."""
        while True:
            batch = self._batches.get()
            results = self._forward_within_memory([ids for _, _, ids in batch])
            self._loop.call_soon_threadsafe(self._end_batch, batch, results)

    def _forward_within_memory(self, ids: list[list[int]]) -> list[Vector | EngineFailed]:
        """The vectors of the texts, by halves when memory runs out; the error of those that cannot be computed."""
        try:
            return list(self._forward(ids))
        except Exception as error:
            ran_out = is_out_of_memory(error)
            name = type(error).__name__
            logger.error("engine.embedding_failed texts=%d", len(ids), exc_info=None if ran_out else error)
        if not ran_out:
            return [EngineFailed(f"{name} while embedding") for _ in ids]
        free_caches()  # the error is gone by now, and with it the tensors of the batch
        self._ran_out = True
        self._limit.halve(len(ids) * max(map(len, ids)))
        if len(ids) == 1:
            return [OutOfMemory(f"memory ran out for a text of {len(ids[0])} tokens alone")]
        middle = len(ids) // 2
        return self._forward_within_memory(ids[:middle]) + self._forward_within_memory(ids[middle:])

    def _end_batch(self, batch: list[Batched], results: list[Vector | EngineFailed]) -> None:
        self._under_way -= 1
        self._computed += 1
        if not any(isinstance(result, EngineFailed) for result in results):
            self._limit.went_well()
        self._begin_batches()
        for (run_id, place, _), result in zip(batch, results, strict=True):
            if isinstance(result, EngineFailed):
                self._fail(run_id, result)
            else:
                self._place(run_id, place, result)

    def _forward(self, ids: list[list[int]]) -> list[list[float]]:
        import torch

        batch = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device_name(self._options))
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1).float()
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=1).cpu().tolist()

    def _place(self, run_id: str, place: int, vector: list[float]) -> None:
        run = self._runs.get(run_id)
        if run is None:
            return
        run.vectors[place] = vector
        run.missing -= 1
        if run.missing == 0:
            del self._runs[run_id]
            self._emit(("finished", self._finished(run)))

    def _fail(self, run_id: str, error: EngineFailed) -> None:
        if self._runs.pop(run_id, None) is not None:
            self._waiting.drop(lambda text: text[0] == run_id)
            self._emit(("failed", RunFailed(run_id=run_id, error=error, retryable_here=True)))

    def _finished(self, run: _Run) -> Finished:
        dimensions = int(run.spec.params.get("dimensions") or self._dimensions)
        tokens = sum(map(len, run.ids))
        return Finished(
            run_id=run.spec.run_id,
            output={"embeddings": [truncate(vector, dimensions) for vector in run.vectors], "dimensions": dimensions},
            finish_reason=None,
            usage={"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            prompt_tokens=tokens,
        )


def truncate(vector: list[float], dimensions: int) -> list[float]:
    """The first dimensions, normalised again."""
    if dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    norm = sum(value * value for value in cut) ** 0.5
    return [value / norm for value in cut] if norm else cut
