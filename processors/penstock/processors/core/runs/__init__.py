"""The runs of requests: which one starts where, its output, its failed attempts and their retries."""
