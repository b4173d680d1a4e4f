"""Dead letters: an index of those that lie on their topic, and what was done with each."""
