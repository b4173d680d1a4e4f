"""OpenAI's routes: their bodies, their answers and their streams, over the same service."""
