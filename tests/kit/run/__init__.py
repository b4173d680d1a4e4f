"""A whole test run: its stages, contracts, repeats, time budget and closing report. `python -m kit.run --help`."""
