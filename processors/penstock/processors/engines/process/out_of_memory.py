"""Out of memory inside an engine's process: how it is recognised, and how what can be freed is freed."""

from __future__ import annotations

import gc
import sys
from typing import Any

_SAID = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
"""What torch says in a plain RuntimeError: its allocator of main memory, and libraries on a card."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a smaller batch may go where this one failed. The cause of an error counts as the error.

    transformers' processors raise ValueError from it.
    """
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID):
            return True
        error = error.__cause__
    return False


def free_caches() -> None:
    """Give back what nobody holds. Call it outside of the except block: the error holds the tensors of its frames."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
