"""Engines: what runs models. One module per kind; local models run in child processes (`host`)."""
