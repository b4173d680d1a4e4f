"""A whole test run: its stages, contracts, repeats, time budget and last page. `python -m kit.run --help`."""
