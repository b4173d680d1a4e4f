"""`make simulate`: python -m simulation SEEDS [--seed S] [--plant NAME]."""

from __future__ import annotations

import sys

from simulation.runner import main

sys.exit(main(sys.argv[1:]))
