"""Probes: what devices there are and how much of their memory is in use, by whom. No decisions about requests here."""
