"""Embeddings inside the child: mean pooling over AutoModel, normalised; requests that come together share a batch."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec
from penstock.processors.engines.child import Emit
from penstock.processors.engines.loading import device_name, dtype_name, resolve_source
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest

logger = logging.getLogger(__name__)


class EmbeddingBackend:
    """One encoder model."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._max_batch_tokens = int(options.get("max_batch_tokens", 4096))
        self._waiting: deque[RunSpec] = deque()
        self._cancelled: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._model: Any = None
        self._tokenizer: Any = None
        self._window = 0
        self._dimensions = 0

    def load(self) -> EngineInfo:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(int(self._options.get("threads", 2)))
        folder = str(resolve_source(self._source))
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = getattr(torch, dtype_name(self._options))
        model: Any = AutoModel.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device_name(self._options)).eval()
        config: Any = self._model.config
        self._window = min(int(config.max_position_embeddings), int(self._options.get("window", 1 << 30)))
        self._dimensions = int(config.hidden_size)
        return EngineInfo(context_window=self._window, dimensions=self._dimensions, device=device_name(self._options))

    def prepare(self, spec: RunSpec) -> Prepared:
        """Raises ContextLengthExceeded for a text that is too long, InvalidRequest for too many dimensions."""
        wanted = spec.params.get("dimensions")
        if wanted is not None and int(wanted) > self._dimensions:
            raise InvalidRequest(
                f"dimensions must be at most {self._dimensions} for this model", param="payload.dimensions"
            )
        lengths = [len(ids) for ids in self._tokenizer(spec.inputs or [])["input_ids"]]
        for number, length in enumerate(lengths):
            if length > self._window:
                raise ContextLengthExceeded(
                    f"input {number} has {length} tokens; the model takes {self._window}",
                    param=f"payload.input[{number}]",
                    details={"need": length, "capacity": self._window, "unit": "tokens"},
                )
        return Prepared(run_id=spec.run_id, prompt_tokens=sum(lengths), need_tokens=0)

    def run(self, spec: RunSpec) -> None:
        self._waiting.append(spec)
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._work())

    def cancel(self, run_id: str) -> None:
        self._cancelled.add(run_id)

    def close(self) -> None:
        self._waiting.clear()

    async def _work(self) -> None:
        """Batch after batch, off the loop, so that more can gather while one is computed."""
        while self._waiting:
            batch: list[RunSpec] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0].inputs or []) <= 256):
                spec = self._waiting.popleft()
                if spec.run_id in self._cancelled:
                    self._cancelled.discard(spec.run_id)
                    continue
                batch.append(spec)
                size += len(spec.inputs or [])
            if not batch:
                continue
            try:
                finished = await asyncio.to_thread(self._embed, batch)
            except Exception as error:
                logger.exception("engine.embedding_failed texts=%d", size)
                failure = EngineFailed(f"{type(error).__name__} while embedding")
                for spec in batch:
                    self._emit(("failed", RunFailed(run_id=spec.run_id, error=failure, retryable_here=True)))
                continue
            for item in finished:
                if item.run_id in self._cancelled:
                    self._cancelled.discard(item.run_id)
                else:
                    self._emit(("finished", item))

    def _embed(self, specs: list[RunSpec]) -> list[Finished]:
        """All texts of all runs, shortest first, in batches of bounded tokens."""
        texts = [(run, place, text) for run, spec in enumerate(specs) for place, text in enumerate(spec.inputs or [])]
        encoded: list[list[int]] = self._tokenizer([text for _, _, text in texts])["input_ids"]
        order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
        vectors: dict[tuple[int, int], list[float]] = {}
        at = 0
        while at < len(order):
            end = at + 1
            while end < len(order) and (end + 1 - at) * len(encoded[order[end]]) <= self._max_batch_tokens:
                end += 1
            chosen = order[at:end]
            for index, vector in zip(chosen, self._forward([encoded[i] for i in chosen]), strict=True):
                run, place, _ = texts[index]
                vectors[(run, place)] = vector
            at = end
        lengths = {(run, place): len(ids) for (run, place, _), ids in zip(texts, encoded, strict=True)}
        return [self._finished(run, spec, vectors, lengths) for run, spec in enumerate(specs)]

    def _forward(self, ids: list[list[int]]) -> list[list[float]]:
        import torch

        batch = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device_name(self._options))
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1).float()
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=1).cpu().tolist()

    def _finished(
        self,
        run: int,
        spec: RunSpec,
        vectors: Mapping[tuple[int, int], list[float]],
        lengths: Mapping[tuple[int, int], int],
    ) -> Finished:
        count = len(spec.inputs or [])
        dimensions = int(spec.params.get("dimensions") or self._dimensions)
        found = [_truncate(vectors[(run, place)], dimensions) for place in range(count)]
        tokens = sum(lengths[(run, place)] for place in range(count))
        return Finished(
            run_id=spec.run_id,
            output={"embeddings": found, "dimensions": dimensions},
            finish_reason=None,
            usage={"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            prompt_tokens=tokens,
        )


def _truncate(vector: list[float], dimensions: int) -> list[float]:
    """The first dimensions, normalised again."""
    if dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    norm = sum(value * value for value in cut) ** 0.5
    return [value / norm for value in cut] if norm else cut
