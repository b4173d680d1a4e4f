"""Makes the models that tests use before any test runs: to train one beside tests takes longer than a test may."""

from __future__ import annotations

import sys


def main() -> int:
    """Prepare all of them in the cache. Returns 1 when one cannot be made: the tests that need it fail then."""
    try:
        from penstock.cli.assets import ASSETS, prepare_model
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
    return failed


if __name__ == "__main__":
    sys.exit(main())
