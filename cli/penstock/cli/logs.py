"""Logging of the long-running processes: one line a record on stderr, at PENSTOCK_LOG_LEVEL (default INFO)."""

from __future__ import annotations

import logging
import os

from penstock.cli.failures import CliFailure, ExitCode

# Libraries that tell each step at INFO.
NOISY = ("aiokafka", "faust", "mode", "httpx", "httpcore", "uvicorn.access", "transformers")


def set_up_logging() -> None:
    """Raises CliFailure when PENSTOCK_LOG_LEVEL names no level."""
    level = os.environ.get("PENSTOCK_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise CliFailure(f"PENSTOCK_LOG_LEVEL is {level}: use DEBUG, INFO, WARNING or ERROR", exit_code=ExitCode.USAGE)
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
