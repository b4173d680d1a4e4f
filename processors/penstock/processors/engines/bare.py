"""An engine's process with a model of next to nothing, made in code: what it holds is the process's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.common.engine_kinds import KINDS
from penstock.processors.engines.backend import Emit, load_class
from penstock.processors.engines.base import EngineInfo, Prepared, RunSpec
from penstock.processors.engines.process.measuring import Meter
from penstock.schemas.errors import EngineFailed

FIRST_TOKEN_S = 60.0


class Bare:
    """`source` is the kind of engine that it stands for. It runs nothing for others."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._kind, self._options = source, options
        self._meter = Meter("cpu")

    def load(self) -> EngineInfo:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(int(self._options.get("threads", 1)))
        kind = KINDS.get(self._kind)
        if kind is not None and kind.backend is not None:
            load_class(kind.backend)
        config: Any = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        )
        self._model: Any = LlamaForCausalLM(config).eval()
        if self._kind == "text":
            self._run_in_a_loop()
        else:
            with torch.inference_mode():
                self._model(input_ids=torch.zeros((8, 16), dtype=torch.long))
        return EngineInfo()

    def _run_in_a_loop(self) -> None:
        from penstock.processors.engines.batching.continuous import start_loop
        from penstock.processors.engines.batching.sampling import GREEDY

        self._model.set_attn_implementation("paged|sdpa")
        loop = start_loop(
            self._model,
            end_ids=[-1],
            pad_id=0,
            max_new_tokens=2,
            on_cpu=True,
            block_size=16,
            num_blocks=8,
            max_batch_tokens=16,
            max_requests_per_batch=2,
        )
        loop.add("bare", [1, 2, 3], 2, GREEDY, [-1])
        if not loop.wait_for_outputs(1, FIRST_TOKEN_S):
            raise EngineFailed(f"the batching loop does not run: {loop.reason}")

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Any]:
        raise EngineFailed("this process runs nothing")

    def run(self, spec: RunSpec, prompt: Any) -> None:
        raise EngineFailed("this process runs nothing")

    def cancel(self, run_id: str) -> None:
        pass

    def check(self) -> None:
        pass

    def progress(self) -> int | None:
        return None

    def measured_memory(self) -> int:
        return self._meter.used_bytes()

    def peak_memory(self) -> int:
        return self._meter.peak_bytes()
