"""Conversations: their turns on compacted topics."""
