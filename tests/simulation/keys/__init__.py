"""Callers that send different bodies under one Idempotency-Key at gateways that are killed, from one seed."""
