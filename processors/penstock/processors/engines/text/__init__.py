"""Text and embeddings: the backends inside the process, and summaries on top of any engine of text."""
