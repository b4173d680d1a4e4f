"""The commands that speak to a running Penstock: over HTTP to the gateway, or over Kafka where they read topics."""
