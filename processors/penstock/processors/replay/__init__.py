"""Replays of traces over a simulated fleet in virtual time, by the product's own scheduler, ledger and placement."""
