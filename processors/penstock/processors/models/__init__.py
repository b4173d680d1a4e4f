"""Which models there are, how they are loaded and what they need."""
