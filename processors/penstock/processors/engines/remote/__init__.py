"""Servers of OpenAI's protocol that others run."""
