"""Logging of the long-running processes, to stderr, at PENSTOCK_LOG_LEVEL (default INFO)."""

from __future__ import annotations

import logging
import os

from penstock.cli.failures import CliFailure, ExitCode
from penstock.schemas.logs import log_to_stderr

# Libraries that tell each step at INFO.
NOISY = ("aiokafka", "faust", "mode", "httpx", "httpcore", "uvicorn.access", "transformers")


def set_up_logging() -> None:
    """Raises CliFailure when PENSTOCK_LOG_LEVEL names no level."""
    level = os.environ.get("PENSTOCK_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise CliFailure(f"PENSTOCK_LOG_LEVEL is {level}: use DEBUG, INFO, WARNING or ERROR", exit_code=ExitCode.USAGE)
    log_to_stderr(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
