"""Conversations: the log of each on Kafka, and the turns of this worker on them."""
