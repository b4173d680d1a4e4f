"""Sums up conversations by their policies: follows their topics, and submits a request for each span that is due."""
