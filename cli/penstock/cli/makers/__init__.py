"""Programs that make a model's folder, each run once as a process of its own: `python -m penstock.cli.makers.NAME`."""
