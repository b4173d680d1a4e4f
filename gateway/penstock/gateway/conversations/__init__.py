"""Reading conversations page by page: an index of each that is asked for, and consumers that are used again."""
