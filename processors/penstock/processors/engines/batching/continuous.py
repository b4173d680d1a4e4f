"""transformers' continuous batching as the text backend uses it. Imported in an engine's process only, where torch is.

The manager would copy each request's tokens, and call the event loop for each of its steps. Here the thread that
computes only says that there is something new, and only when nobody is going to look anyway; the event loop reads the
tokens from the requests themselves, when it has time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)

from penstock.processors.engines.batching.controls import Control
from penstock.processors.engines.batching.logits import ControlledRunner
from penstock.processors.engines.batching.sampling import Sampling
from penstock.processors.engines.batching.steps import SCHEDULER, PromptOrder, UrgentFirst
from penstock.processors.engines.batching.turns import turn_of
from penstock.processors.engines.process.out_of_memory import free_caches, is_out_of_memory
from penstock.schemas.errors import PenstockError

ENDS_WITHIN_S = 10.0
"""A loop that has died fails its requests, and its thread is over."""


class BatchingLoop(ContinuousBatchingManager):
    """A manager that counts its turns. `on_news(ended)` is called in its thread; `ended`: some run is over."""

    def __init__(self, model: Any, generation: GenerationConfig, config: ContinuousBatchingConfig) -> None:
        super().__init__(model=model, generation_config=generation, continuous_batching_config=config)
        self.on_news: Callable[[bool], None] = lambda ended: None
        self.turns = 0
        """Grows as long as the thread moves, with work or without."""
        self.current_batch = 0
        self.controls: dict[str, Control] = {}
        """By run: what is asked of its logits beyond the loop's own sampling."""
        self._places: dict[str, PromptOrder] = {}
        self._reused: dict[str, int] = {}
        """By run: tokens of its prompt whose blocks were in the cache already."""
        self._outputs: deque[Any] = deque()
        self.output_router = _Router(self._outputs, self._tell)

    def _tell(self) -> None:
        self.on_news(True)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        self.turns += 1
        batch, began = self.current_batch, time.perf_counter()
        goes_on = super()._generation_loop_body(batch_processor, bootstrapping)
        if self.current_batch != batch:
            steps: UrgentFirst = batch_processor.scheduler
            steps.pace.observe(*steps.scheduled, time.perf_counter() - began)
            self.on_news(False)
        return goes_on

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if not isinstance(processor.model_runner, ControlledRunner):
            processor.model_runner = ControlledRunner(
                processor.model_runner, self.controls, self._fail_run, threads=torch.get_num_threads()
            )
        self._count_reused(processor.cache)
        steps: Any = processor.scheduler
        steps.places = self._places
        return processor

    def _count_reused(self, cache: Any) -> None:
        """Blocks of prompts stay in the cache until their room is needed; the loop does not report whose were found."""
        search: Callable[[str, list[int]], int] = cache.search_prefix_match

        def search_and_count(request_id: str, prompt_ids: list[int]) -> int:
            control = self.controls.get(request_id)
            if control is not None and control.options.prompt_logprobs is not None:
                return 0  # what the cache holds has no logits
            found = search(request_id, prompt_ids)
            self._reused[request_id] = min(found, len(prompt_ids) - 1)  # the last one is always computed
            return found

        cache.search_prefix_match = search_and_count

    def reused_tokens(self, run_id: str) -> int | None:
        """Of its prompt, not computed again; None when the cache of this model cannot be shared."""
        processor: Any = self.batch_processor
        if processor is None or not processor.cache.use_prefix_sharing:
            return None
        return self._reused.get(run_id, 0)

    def _fail_run(self, run_id: str, error: PenstockError) -> None:
        """End one run of many, in the loop's thread."""
        if self.controls.pop(run_id, None) is not None:
            self.cancel_request(run_id)
            self._outputs.append(FailedRun(run_id, error))
            self._tell()

    @property
    def dead(self) -> bool:
        """Whether its thread has ended, or is ending and fails its requests."""
        return self.background_thread_status.local_status != BackgroundThreadStatus.DONT_STOP or not self.is_running()

    @property
    def reason(self) -> str:
        return repr(self.background_thread_status.fatal_error)

    @property
    def out_of_memory(self) -> bool:
        """Whether it died of that. Waits for the end of its thread, which says so last."""
        thread = self._generation_thread
        if thread is not None:
            thread.join(ENDS_WITHIN_S)
        return is_out_of_memory(self.background_thread_status.fatal_error)

    def begin_anew(self, max_batch_tokens: int) -> None:
        """After it died of `out_of_memory`: the same cache, emptied; what is freed is freed. No request is in it."""
        self._generation_thread = None
        self.background_thread_status.clear()  # the error, and with it the tensors of the batch that failed
        self.take_outputs()
        free_caches()
        if self.batch_processor is not None:
            self.batch_processor.max_batch_tokens = max_batch_tokens
        self.start()

    def touch_cache(self) -> None:
        """Have main memory for all of the cache: reserved pages are not there before they are written."""
        processor: Any = self.batch_processor
        for tensor in [] if processor is None else [*processor.cache.key_cache, *processor.cache.value_cache]:
            tensor.zero_()

    def set_batch_tokens(self, max_batch_tokens: int) -> None:
        """Limit the tokens of a step, from the next one on, to at most what it was made for."""
        if self.batch_processor is not None:
            self.batch_processor.max_batch_tokens = max_batch_tokens

    def add(
        self,
        run_id: str,
        ids: list[int],
        new_tokens: int,
        sampling: Sampling,
        end_ids: list[int],
        control: Control | None = None,
        priority: int = 5,
    ) -> bool:
        """Whether the loop took it; it takes nothing once it has died. When the run is over: `forget`."""
        if control is not None:
            self.controls[run_id] = control
        self._places[run_id] = PromptOrder(priority, turn_of(priority, time.monotonic()))
        added = self.add_request(
            ids,
            request_id=run_id,
            max_new_tokens=new_tokens,
            streaming=False,
            eos_token_id=end_ids,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        return added is not None

    def forget(self, run_id: str) -> None:
        self.controls.pop(run_id, None)
        self._reused.pop(run_id, None)
        self._places.pop(run_id, None)

    def generated(self, run_id: str) -> list[int] | None:
        """The tokens of a run so far, not to be changed; None when it has not begun or is over."""
        processor = self.batch_processor
        state: Any = None if processor is None else processor.scheduler.active_requests.get(run_id)
        if state is None:
            return None
        if state._true_initial_tokens:  # it was set back, and its first tokens are computed again as a prompt
            return state.initial_tokens[state._true_initial_tokens :] + state.generated_tokens
        return state.generated_tokens

    def take_outputs(self) -> list[Any]:
        """Outputs of runs that have finished or failed since the last call."""
        taken: list[Any] = []
        while self._outputs:
            taken.append(self._outputs.popleft())
        return taken

    def wait_for_outputs(self, count: int, timeout_s: float) -> list[Any]:
        """The next outputs; fewer when they do not come in time or the loop dies. For before anybody else listens."""
        news = threading.Event()
        self.on_news = lambda ended: news.set()
        give_up = time.monotonic() + timeout_s
        outputs: list[Any] = []
        while len(outputs) < count and time.monotonic() < give_up and not self.dead:
            news.wait(0.1)
            news.clear()
            outputs += self.take_outputs()
        return outputs


@dataclass(frozen=True, slots=True)
class FailedRun:
    """An output of a run that failed alone, while the loop goes on."""

    request_id: str
    error: PenstockError


class _Router(OutputRouter):
    """Keeps what is delivered until it is taken. What comes for a cancelled run is taken, and belongs to nobody."""

    def __init__(self, outputs: deque[Any], tell: Callable[[], None]) -> None:
        super().__init__()
        self._outputs = outputs
        self._tell = tell

    def deliver(self, output: Any) -> None:
        self._outputs.append(output)
        self._tell()

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._outputs.extend(outputs)
        self._tell()


def start_loop(
    model: Any, *, end_ids: list[int], pad_id: int, max_new_tokens: int, on_cpu: bool, **sizes: Any
) -> BatchingLoop:
    """A loop that runs. `sizes`: block_size, num_blocks, max_batch_tokens, max_requests_per_batch."""
    # Base values other than the defaults make the per-request processors exist at all.
    generation = GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        max_new_tokens=max_new_tokens,
        eos_token_id=end_ids,
        pad_token_id=pad_id,
    )
    config = ContinuousBatchingConfig(
        **sizes,
        scheduler_type=SCHEDULER,
        per_request_processors=True,
        use_cuda_graph=False if on_cpu else None,
        use_async_batching=False if on_cpu else None,
        # Admission has reserved a run's whole length before it comes here: no prompt need wait for a margin.
        safety_margin=0.0,
    )
    loop = BatchingLoop(model, generation, config)
    loop.start()
    return loop
