"""Makes the models that tests use, and what Kafka needs, before any test runs: beside tests it takes too long."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def main() -> int:
    """Prepare all of them in the cache. Returns 1 when one cannot be made: the tests that need it fail then."""
    try:
        from penstock.cli.assets import ASSETS, prepare_model
        from penstock.cli.embedded_kafka import EmbeddedKafka
        from penstock.cli.failures import CliFailure
    except ImportError:
        return 0  # the command line's parts are not installed: those tests are skipped
    failed = 0
    for model in ASSETS:
        try:
            prepare_model(model, lambda text: print(text, flush=True))
        except CliFailure as failure:
            print(f"{model}: {failure}", file=sys.stderr)
            failed = 1
    with TemporaryDirectory() as folder:
        EmbeddedKafka(Path(folder)).prepare()
    return failed


if __name__ == "__main__":
    sys.exit(main())
