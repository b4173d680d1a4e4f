"""Batches and their files, as OpenAI has them."""
