"""What waits: classes, tenants, lines of conversations, slack, parked requests, and why and how long."""
