"""Answers in a form: grammars, schemas, and calls of tools in each model's dialect."""
