"""Backends for tests of the process around a model: they are loaded in it by name."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from penstock.processors.earlier_messages import NO_EARLIER_MESSAGES
from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunSpec
from penstock.processors.engines.images.diffusion import DiffusionBackend
from penstock.processors.engines.images.vision import VisionBackend
from penstock.processors.engines.text.backend import TextBackend
from penstock.processors.engines.text.embedding import EmbeddingBackend
from penstock.schemas.records import ContextHeld

NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"


class Plain:
    """Answers each run with its prompt at once, on the event loop."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self.source, self.options, self.emit = source, options, emit

    def load(self) -> EngineInfo:
        return EngineInfo(context_window=1000)

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Any]:
        # How many messages it was given is how the test sees them.
        past = spec.history or NO_EARLIER_MESSAGES
        tokens = len(spec.prompt or "") + len(past.messages)
        held = ContextHeld(turns=0, dropped_turns=past.omitted_turns)
        return Prepared(run_id=spec.run_id, prompt_tokens=tokens, need_tokens=0, held=held), spec.prompt

    def run(self, spec: RunSpec, prompt: Any) -> None:
        self.emit(("delta", spec.run_id, prompt, [1], 0, (), ()))
        self.emit(("finished", Finished(run_id=spec.run_id, output={"text": prompt}, finish_reason="stop")))

    def cancel(self, run_id: str) -> None:
        pass

    def check(self) -> None:
        pass

    def progress(self) -> int | None:
        return None

    def measured_memory(self) -> int:
        return 1


class SlowPrepare(Plain):
    """Takes its time to prepare what is long."""

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Any]:
        if len(spec.prompt or "") > 10_000:
            time.sleep(float(self.options["seconds"]))
        return super().prepare(spec)


class NeverLoaded(Plain):
    """Its load does not end."""

    def load(self) -> EngineInfo:
        time.sleep(3600)
        raise AssertionError


class LoadsLong(Plain):
    """Its load computes for seven seconds of processor time."""

    def load(self) -> EngineInfo:
        while time.thread_time() < 7:
            pass
        return super().load()


class Unsendable(Plain):
    """What it gives cannot be pickled."""

    def run(self, spec: RunSpec, prompt: Any) -> None:
        self.emit(("delta", spec.run_id, threading.Lock(), [1], 0, (), ()))


class PreparesNonsense(Plain):
    """What it prepares is not what it should be: the process around it fails where nobody waits."""

    def prepare(self, spec: RunSpec) -> Any:
        return None


class CheckFails(Plain):
    """Its own look after itself fails, which is nobody's run."""

    def check(self) -> None:
        raise RuntimeError("as in a bug")


class HangingText(TextBackend):
    """A text engine whose model, once told so by a prompt of `hang` tokens, computes for ever."""

    def load(self) -> EngineInfo:
        info = super().load()
        model: Any = self._model
        forward = model.forward

        def hang_after_the_first(*arguments: Any, **named: Any) -> Any:
            if self.hang:
                time.sleep(3600)
            return forward(*arguments, **named)

        self.hang = False
        model.forward = hang_after_the_first
        return info

    def run(self, spec: RunSpec, prompt: Any) -> None:
        self.hang = spec.params.get("max_tokens") == int(self._options["hang_at"])
        super().run(spec, prompt)


class PoisonedText(TextBackend):
    """A text engine whose batching loop dies of a run with this many tokens."""

    def run(self, spec: RunSpec, prompt: Any) -> None:
        super().run(spec, prompt)
        if spec.params.get("max_tokens") == int(self._options["dies_at"]):
            out_of_vocabulary = [10**6]
            self._batching.add_request(out_of_vocabulary, request_id="poison", max_new_tokens=2, eos_token_id=[-1])


def steps_in(file: Path) -> int:
    try:
        return int(file.read_text() or 0)
    except FileNotFoundError:
        return 0


class StarvedText(TextBackend):
    """A text engine whose device, once it is warm, has memory for no more than `most_tokens` tokens in a step.

    With `hungry` only once that file is there, and for as many steps as it says.
    """

    def warm_up(self) -> None:
        super().warm_up()
        model: Any = self._model
        forward = model.forward
        most, hungry = int(self._options["most_tokens"]), self._options.get("hungry")
        refused = 0

        def forward_within_memory(*arguments: Any, **named: Any) -> Any:
            import torch

            nonlocal refused
            tokens = named["input_ids"] if "input_ids" in named else arguments[0]
            if tokens.numel() > most and (hungry is None or refused < steps_in(Path(hungry))):
                refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return forward(*arguments, **named)

        model.forward = forward_within_memory


class StarvedVision(VisionBackend):
    """A reader of images whose memory runs out at the third token of a batch of more than `most_rows`."""

    def load(self) -> EngineInfo:
        info = super().load()
        model: Any = self._model
        generate, forward = model.generate, model.forward
        most, self.steps = int(self._options["most_rows"]), 0

        def generate_anew(*arguments: Any, **named: Any) -> Any:
            self.steps = 0
            return generate(*arguments, **named)

        @wraps(forward)  # its signature says which inputs the model takes
        def forward_within_memory(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            if self.steps == 3 and named["input_ids"].shape[0] > most:
                raise RuntimeError(NO_MEMORY)
            return forward(*arguments, **named)

        model.generate, model.forward = generate_anew, forward_within_memory
        return info


class StarvedDiffusion(DiffusionBackend):
    """A maker of images whose memory runs out at the second step of more than `most_rows` images."""

    def load(self) -> EngineInfo:
        info = super().load()
        model: Any = self._pipelines.base.unet
        forward = model.forward
        most, self.steps = int(self._options["most_rows"]), 0

        def forward_within_memory(sample: Any, *arguments: Any, **named: Any) -> Any:
            self.steps += 1
            if sample.shape[0] > 2 * most and self.steps % 2 == 0:  # guidance doubles the rows
                raise RuntimeError(NO_MEMORY)
            return forward(sample, *arguments, **named)

        model.forward = forward_within_memory
        return info


class NoMemoryToLoad(TextBackend):
    """Memory runs out while it loads."""

    def load(self) -> EngineInfo:
        raise RuntimeError(NO_MEMORY)


class TightEmbedding(EmbeddingBackend):
    """An embedding engine that the kernel gives so many bytes of data more, once it is warm."""

    def warm_up(self) -> None:
        # Not the warm-up of its kind: what that frees would be room that the limit does not see.
        lines = Path("/proc/self/status").read_text().splitlines()
        held = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
        limit = held + int(self._options["room_bytes"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
