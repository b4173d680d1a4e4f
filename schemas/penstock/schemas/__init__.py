"""Penstock's records and rules that every part shares: pure, without I/O, importing nothing of ours."""
