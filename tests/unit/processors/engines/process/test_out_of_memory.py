"""Which errors mean that memory ran out."""

import pytest

from penstock.processors.engines.process.out_of_memory import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried …"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [None, ValueError("out of memory"), RuntimeError("shapes differ"), KeyError("x")])
def test_anything_else(error: Exception | None) -> None:
    assert not is_out_of_memory(error)
