"""Batches: how large, when they begin, and transformers' continuous batching with each run's own sampling."""
