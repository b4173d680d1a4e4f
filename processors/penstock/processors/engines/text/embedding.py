"""Embeddings inside the child: mean pooling over AutoModel, normalised; texts that come together share batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec, refuse_unsupported
from penstock.processors.engines.batching.batches import Batches
from penstock.processors.engines.batching.length_batches import LengthBatches
from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.batching.turns import turn_of
from penstock.processors.engines.process.loading import device_name, padded_tokens, set_up_torch
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.engines.process.weights import code_option, load_weights
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest

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
        self.vectors: list[Vector] = [[]] * len(ids)
        self.missing = len(ids)
        self.over = False


@dataclass(slots=True, eq=False)
class _Text:
    """One input of a run."""

    run: _Run
    place: int

    @property
    def ids(self) -> list[int]:
        return self.run.ids[self.place]


class EmbeddingBackend:
    """One encoder model."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._meter = Meter(device_name(options))
        self._runs: dict[str, _Run] = {}
        self._waiting: LengthBatches[_Text] = LengthBatches()
        self._batches = Batches[_Text, Vector](
            self._waiting, self, BatchLimit(padded_tokens(options), LEAST_TOKENS), emit
        )
        self._model: Any = None
        self._tokenizer: Any = None
        self._window = 0
        self._dimensions = 0
        self._vocabulary = 0

    def load(self) -> EngineInfo:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        folder = self._source
        device = device_name(self._options)
        set_up_torch(self._options)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **code_option(self._options))
        self._model = load_weights(AutoModel, folder, self._options)
        config: Any = self._model.config
        self._window = min(int(config.max_position_embeddings), int(self._options.get("window", 1 << 30)))
        self._dimensions = int(config.hidden_size)
        self._first_id = self._tokenize(["warm up"])[0][0]
        self._vocabulary = int(config.vocab_size)
        self._forward([self._tokenize(["warm up"])[0]])
        self._batches.start()
        return EngineInfo(context_window=self._window, dimensions=self._dimensions, device=device)

    def warm_up(self) -> None:
        """The largest batch, after smaller ones: texts as long as the window. Raises OutOfMemory when none fits."""
        for share in (8, 2, 1):
            began = time.monotonic()
            texts = length = 0
            pairs: list[tuple[_Text, Vector | EngineFailed]] = []
            while not texts or (texts > 1 and texts * length > self._batches.limit.size):
                length = max(1, self._window // share)
                texts = max(1, self._batches.limit.size // length)
                spec = RunSpec(run_id="warm-up", task="embedding", model="")
                made_up = _Run(spec, [[self._first_id] * length] * texts)
                pairs = self._batches.within_memory([_Text(made_up, place) for place in range(texts)])
            if texts == 1 and isinstance(failure := pairs[0][1], EngineFailed):
                raise failure
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
        if (most := spec.params.get("truncate_prompt_tokens")) is not None:
            ids = self._cut(ids, self._window if most == -1 else min(most, self._window), given is not None)
        for number, tokens in enumerate(ids):
            if len(tokens) > self._window:
                raise ContextLengthExceeded(
                    f"input {number} has {len(tokens)} tokens; the model takes {self._window}",
                    param=f"payload.input[{number}]",
                    details={"need": len(tokens), "capacity": self._window, "unit": "tokens"},
                )
        return Prepared(run_id=spec.run_id, prompt_tokens=sum(map(len, ids)), need_tokens=0), ids

    def _cut(self, ids: list[list[int]], most: int, bare: bool) -> list[list[int]]:
        """Texts of at most so many tokens. A text that is cut still ends in the tokens that the tokenizer adds.

        `bare`: the tokens are the caller's own, and nothing was added to them.
        """
        added = [] if bare else self._tokenize([""])[0]
        ends = added[(len(added) + 1) // 2 :]
        return [
            tokens if len(tokens) <= most else [*tokens[: max(1, most - len(ends))], *ends][:most] for tokens in ids
        ]

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
        run = self._runs[spec.run_id] = _Run(spec, prompt)
        turn = turn_of(spec.priority, time.monotonic())
        for place, ids in enumerate(prompt):
            self._waiting.add(_Text(run, place), len(ids), turn)
        self._batches.look()

    def cancel(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.over = True
            self._waiting.drop(lambda text: text.run is run)

    def check(self) -> None:
        self._batches.check()

    def progress(self) -> int | None:
        return self._batches.progress()

    def measured_memory(self) -> int:
        return self._meter.used_bytes()

    def peak_memory(self) -> int:
        return self._meter.peak_bytes()

    def compute(self, batch: Sequence[_Text]) -> list[Vector]:
        return self._forward([text.ids for text in batch])

    def weight(self, batch: Sequence[_Text]) -> int:
        """Padded tokens."""
        return len(batch) * max(len(text.ids) for text in batch)

    def wanted(self, item: _Text) -> bool:
        return not item.run.over

    def split(self, item: _Text) -> Sequence[_Text]:
        return ()

    def ended(self, item: _Text, result: Vector | EngineFailed) -> None:
        run = item.run
        if run.over:
            return
        if isinstance(result, EngineFailed):
            self.cancel(run.spec.run_id)
            self._emit(("failed", RunFailed(run_id=run.spec.run_id, error=result, retryable_here=True)))
            return
        run.vectors[item.place] = result
        run.missing -= 1
        if run.missing == 0:
            del self._runs[run.spec.run_id]
            self._emit(("finished", self._finished(run)))

    def _forward(self, ids: list[list[int]]) -> list[list[float]]:
        import torch

        batch = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device_name(self._options))
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1).float()
            pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(pooled, dim=1).cpu().tolist()

    def _finished(self, run: _Run) -> Finished:
        dimensions = int(run.spec.params.get("dimensions") or self._dimensions)
        tokens = sum(map(len, run.ids))
        return Finished(
            run_id=run.spec.run_id,
            output={"embeddings": [truncate(vector, dimensions) for vector in run.vectors], "dimensions": dimensions},
            finish_reason=None,
            usage={"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        )


def truncate(vector: list[float], dimensions: int) -> list[float]:
    """The first dimensions, normalised again."""
    if dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    norm = sum(value * value for value in cut) ** 0.5
    return [value / norm for value in cut] if norm else cut
