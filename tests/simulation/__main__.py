"""`make simulate`: python -m simulation SEEDS [--seed S] [--plant NAME]."""

from __future__ import annotations

import logging
import sys

from simulation.runner import main

logging.getLogger("penstock").setLevel(logging.ERROR)  # what workers warn of is expected here
sys.exit(main(sys.argv[1:]))
