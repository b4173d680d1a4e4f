"""Servers of OpenAI's protocol that a worker starts and ends."""
