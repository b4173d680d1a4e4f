"""URLs that callers name: which may be called, and connections to addresses that were checked."""
