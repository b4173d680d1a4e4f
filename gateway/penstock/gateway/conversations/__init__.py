"""Reads pages of conversations by offset, with an index per conversation and a pool of consumers."""
