"""`penstock webhooks`: each `callback_url` is called with the outcome (decisions/0059)."""
