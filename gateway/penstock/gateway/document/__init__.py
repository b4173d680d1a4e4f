"""The OpenAPI and AsyncAPI documents, and the page that shows the former."""
