"""`penstock webhooks`: whoever gave a `callback_url` is called with the outcome (decisions/0059)."""
