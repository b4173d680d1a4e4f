"""The fault table: a system is struck at a chosen moment, and a checker says what its callers saw."""
