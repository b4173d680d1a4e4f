"""What waits: classes, tenants, conversations, slack, memory of bodies, measured times. It knows no device."""
