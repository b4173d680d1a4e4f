"""The pages of docs/reference that are made from the code: one module per page, each with `page() -> str`."""
