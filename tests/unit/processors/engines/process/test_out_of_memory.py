"""Which errors mean that memory ran out."""

import pytest

from penstock.processors.engines.process.out_of_memory import is_out_of_memory

CPU_SAYS = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried …"


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def raised_from(cause: Exception) -> Exception:
    error = ValueError("Unable to convert output 'pixel_values' (type: list) to tensor")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA"),
        RuntimeError(CPU_SAYS),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        raised_from(RuntimeError(CPU_SAYS)),
        raised_from(raised_from(MemoryError())),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("out of memory"),
        RuntimeError("shapes differ"),
        KeyError("x"),
        raised_from(RuntimeError("shapes differ")),
    ],
)
def test_anything_else(error: Exception | None) -> None:
    assert not is_out_of_memory(error)
