"""Probes: what devices there are and how much of their memory is in use. No decisions here."""
