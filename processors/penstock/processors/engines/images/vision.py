"""Text from images inside the child: models of transformers' image-text-to-text class, in batches.

What comes together and has inputs of one shape is one batch; what comes meanwhile waits for the next. A run that is
cancelled, or has its answer, ends by itself; the batch ends with its last run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Message, Prepared, RunFailed, RunSpec, refuse_unsupported
from penstock.processors.engines.batching.alike import AlikeBatches
from penstock.processors.engines.batching.batches import Batches
from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.batching.sampling import GREEDY, sampling_of
from penstock.processors.engines.batching.turns import turn_of
from penstock.processors.engines.context import build_context, identity
from penstock.processors.engines.image_messages import with_images
from penstock.processors.engines.process.loading import device_name, dtype_name, end_ids_of, set_up_torch
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.engines.process.weights import load_weights
from penstock.processors.engines.text.detokenise import Detokeniser
from penstock.processors.engines.text.run import TextRun
from penstock.processors.images.pictures import as_seen
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest
from penstock.schemas.records import ContextHeld

if TYPE_CHECKING:
    from penstock.processors.engines.batching.rows import Row
    from penstock.processors.engines.images.vision_prompts import Inputs, Prompts

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 256
DEFAULT_WINDOW = 2048
SLOTS = 4
BATCH_WINDOW_MS = 10.0
"""A batch that is not full waits so long for what is started with it, or in the places that the last one has left."""


class VisionBackend:
    """One model that reads images. `slots` (4) is how many prompts a batch holds at most."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, tuple[Row, TextRun]] = {}
        self._waiting: AlikeBatches[Row] = AlikeBatches(self._key)
        self._batches: Batches[Row, None] = Batches(
            self._waiting,
            self,
            BatchLimit(int(options.get("slots", SLOTS))),
            emit,
            window_s=float(options.get("batch_window_ms", BATCH_WINDOW_MS)) / 1000,
        )
        self._will_look = False
        self._model: Any = None
        self._prompts: Prompts
        self._eos: frozenset[int] = frozenset()
        self._pad = 0
        self._window = DEFAULT_WINDOW
        self._vocabulary = 0
        self._encodes = False

    def load(self) -> EngineInfo:
        from transformers import AutoModelForImageTextToText
        from transformers.utils.logging import disable_progress_bar

        from penstock.processors.engines.images.vision_prompts import Prompts

        disable_progress_bar()
        set_up_torch(self._options)
        self._prompts = Prompts(self._source, self._options)
        self._model = load_weights(AutoModelForImageTextToText, self._source, self._options)
        self._encodes = bool(self._model.config.is_encoder_decoder)
        config: Any = self._model.config.get_text_config(decoder=True)
        longest = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_WINDOW)
        self._window = min(longest, int(self._options.get("window", 1 << 30)))
        self._vocabulary = int(config.vocab_size)
        self._eos = end_ids_of(self._model.generation_config, self._prompts.tokenizer)
        pad = self._prompts.tokenizer.pad_token_id
        self._pad = int(pad if pad is not None else min(self._eos, default=0))
        self._warm_up()
        self._batches.start()
        return EngineInfo(
            context_window=self._window, max_output_tokens=self._window - 1, device=device_name(self._options)
        )

    def _warm_up(self) -> None:
        """One token of a caption, so that "ready" means that the model really answers."""
        from PIL import Image

        from penstock.processors.engines.batching.rows import Row

        inputs = self._on_device(self._prompts.caption(Image.new("RGB", (64, 64)), None))
        self._generate([Row("warm-up", inputs, 1, GREEDY, None)], lambda: None)

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Row]:
        """Raises ContextLengthExceeded, InvalidRequest, UnsupportedParameter."""
        from penstock.processors.engines.batching.rows import Row

        refuse_unsupported(spec)
        params = spec.params if spec.task == "text_generation" else spec.payload
        seed = params.get("seed")
        sampling = GREEDY
        if spec.task == "text_generation":
            sampling = sampling_of({**spec.params, "seed": None}, vocabulary=self._vocabulary)
        wanted = None if "max_tokens" in spec.defaulted else params.get("max_tokens")
        inputs, held = self._inputs(spec, 1 if wanted is None else int(wanted))
        tokens = int(inputs["input_ids"].shape[1]) if "input_ids" in inputs else 0
        new_tokens = self._fit(tokens, wanted, int(params.get("max_tokens") or DEFAULT_MAX_TOKENS))
        prepared = Prepared(
            run_id=spec.run_id,
            prompt_tokens=tokens,
            need_tokens=0,
            held=held,
        )
        return prepared, Row(spec.run_id, self._on_device(inputs, "cpu"), new_tokens, sampling, seed)

    def _inputs(self, spec: RunSpec, reserve: int) -> tuple[Inputs, ContextHeld | None]:
        """(the prompt as tensors, what it holds of its conversation)"""
        if spec.task == "image_to_text":
            if "image" not in spec.images:
                raise InvalidRequest("payload.image is missing", param="payload.image")
            image = as_seen(spec.images["image"])
            return self._prompts.caption(image, spec.payload.get("prompt")), None
        if spec.messages is None:
            return self._prompts.chat([{"role": "user", "content": spec.prompt or ""}]), None
        rendered: dict[tuple[int, ...], Inputs] = {}

        def count(chosen: Sequence[Message]) -> int:
            inputs = rendered[identity(chosen)] = self._prompts.chat(chosen)
            return int(inputs["input_ids"].shape[1])

        past = spec.history
        if past is not None:
            past = replace(past, messages=with_images(past.messages, spec, as_seen))
        context = build_context(
            past,
            with_images(spec.messages, spec, as_seen),
            window_tokens=self._window,
            max_output_tokens=reserve,
            limits=spec.context,
            count=count,
        )
        return rendered[identity(context.messages)], context.held

    def _fit(self, tokens: int, wanted: int | None, default: int) -> int:
        """How many tokens may follow: as asked, or what fits up to the default."""
        taken = 1 if self._encodes else tokens
        room = self._window - taken
        if room < (wanted or 1):
            raise ContextLengthExceeded(
                f"the prompt has {taken} tokens, its images among them, and {wanted or 1} shall follow;"
                f" the window is {self._window}",
                param="payload",
                details={"need": taken + (wanted or 1), "capacity": self._window, "unit": "tokens"},
            )
        return wanted if wanted is not None else min(room, default)

    def _on_device(self, inputs: Inputs, device: str | None = None) -> Inputs:
        """Tensors alone, those of pixels in the model's type."""
        import torch

        dtype = getattr(torch, dtype_name(self._options))
        return {
            name: tensor.to(device or device_name(self._options), dtype if tensor.is_floating_point() else None)
            for name, tensor in inputs.items()
            if isinstance(tensor, torch.Tensor)
        }

    def run(self, spec: RunSpec, prompt: Row) -> None:
        tokens = int(prompt.inputs["input_ids"].shape[1]) if "input_ids" in prompt.inputs else 0
        tokenizer = self._prompts.tokenizer
        detokeniser = Detokeniser(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        run = TextRun(spec, tokens, detokeniser, self._eos.__contains__, self._emit)
        self._runs[spec.run_id], prompt.is_read = (prompt, run), run.wants_steps
        self._waiting.add(prompt, turn_of(spec.priority, time.monotonic()))
        self._batches.look()

    def cancel(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            run[0].over = True
            self._waiting.drop(lambda row: row.over)

    def check(self) -> None:
        self._batches.check()

    def progress(self) -> int | None:
        return self._batches.progress()

    def measured_memory(self) -> int:
        return Meter(device_name(self._options)).used_bytes()

    def _key(self, row: Row) -> Hashable:
        """What prompts of one batch have in common: the shapes of their inputs."""
        from penstock.processors.engines.batching.rows import batch_key

        return batch_key(row.inputs, pads=not self._encodes)

    # -- in the thread that computes

    def compute(self, batch: Sequence[Row]) -> list[None]:
        self._generate(batch, partial(self._on_step, batch))
        return [None] * len(batch)

    def weight(self, batch: Sequence[Row]) -> int:
        return len(batch)

    def wanted(self, item: Row) -> bool:
        return not (item.over or item.ended)

    def split(self, item: Row) -> Sequence[Row]:
        return ()

    def _generate(self, rows: Sequence[Row], on_step: Any) -> None:
        import torch
        from transformers import GenerationConfig

        from penstock.processors.engines.batching.rows import RowEnds, RowSampling, joined

        own: Any = self._model.generation_config
        config = GenerationConfig(
            max_new_tokens=max(row.new_tokens for row in rows),
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(self._eos) or None,
            pad_token_id=self._pad,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
        )
        with torch.inference_mode():
            self._model.generate(
                **self._on_device(joined(rows, self._pad)),
                generation_config=config,
                logits_processor=[RowSampling(rows)],
                stopping_criteria=[RowEnds(rows, self._eos.__contains__, on_step)],
            )

    def _on_step(self, batch: Sequence[Row]) -> None:
        """The event loop is not woken for what nobody reads while it is made: it would hold up the computing."""
        self._batches.moved()
        if not self._will_look and any(row.ended or row.is_read for row in batch):
            self._will_look = True
            self._loop.call_soon_threadsafe(self._look)

    # -- on the event loop

    def _look(self) -> None:
        self._will_look = False  # before looking: what comes from here on is either seen now or reported again
        for row, run in list(self._runs.values()):
            ended = row.ended  # before its tokens: they are written first
            if ended or (row.is_read and len(row.made) > run.seen):
                self._advance(row, run, final=ended)

    def _advance(self, row: Row, run: TextRun, *, final: bool) -> None:
        try:
            run.take(row.made[:], final=final)
            if final or run.stopped:
                row.over = True
                del self._runs[run.run_id]
                run.finish()
        except Exception as error:  # in a callback nobody hears it
            logger.exception("engine.output_failed")
            row.over = True
            self._fail(run.run_id, EngineFailed(f"{type(error).__name__} while the output was read"))

    def ended(self, item: Row, result: EngineFailed | None) -> None:
        known = self._runs.get(item.run_id)
        if known is None:
            return
        if result is not None:
            self._fail(item.run_id, result)
        elif item.ended:
            self._advance(*known, final=True)
        else:
            self._fail(item.run_id, EngineFailed("the model ended without an answer"))

    def _fail(self, run_id: str, error: EngineFailed) -> None:
        if self._runs.pop(run_id, None) is not None:
            self._emit(("failed", RunFailed(run_id=run_id, error=error, retryable_here=True)))
