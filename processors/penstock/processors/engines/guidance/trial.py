"""The program that tries to compile grammars, in a process of its own: with some it never ends or takes all memory.

    python -m penstock.processors.engines.guidance.trial MEMORY_BYTES TOKENIZER_FD

The descriptor holds the tokenizer as JSON: {described, vocabulary, end_ids}. On the standard input come jobs, as
`guarded/wire.py` writes them: {size, cpu_s}, then so many bytes of a grammar. On the standard output goes an answer for
each: {error}, which is null for a grammar that was compiled. A grammar that takes more processor time or more memory
than it may ends this process.
"""

from __future__ import annotations

import json
import os
import sys

from penstock.processors.engines.guidance.compiling import TokenizerFacts, compiled, llguidance_tokenizer
from penstock.processors.guarded.limits import limit_cpu, limit_this_process
from penstock.processors.guarded.wire import read_header, write

_NICENESS = 10
"""The engine computes on the same cores, and its streams go first."""


def main(argv: list[str]) -> int:
    memory_bytes, descriptor = (int(text) for text in argv)
    limit_this_process(memory_bytes)
    os.nice(_NICENESS)
    os.environ["RAYON_NUM_THREADS"] = "1"  # threads of llguidance, one a core, would take the address space
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # another description: it begins at the beginning
        facts = TokenizerFacts(**json.load(file))
    tokenizer = llguidance_tokenizer(facts)
    if tokenizer is None:
        return 1
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while job := read_header(jobs):
        grammar = jobs.read(job["size"]).decode()
        limit_cpu(job["cpu_s"])
        write(answers, {"error": compiled(tokenizer, grammar).get_error() or None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
