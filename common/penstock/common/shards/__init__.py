"""Conversations that share one topic: how their records are addressed, and a file that finds those of one."""
