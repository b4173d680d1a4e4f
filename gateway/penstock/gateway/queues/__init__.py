"""Queues of other systems, merged into Penstock's own: each message becomes a request, its outcome goes back."""
