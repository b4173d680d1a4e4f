"""Keys and limits that operators order while gateways run, and the record of what operators do."""
