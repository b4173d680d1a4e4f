"""`penstock webhooks` as a whole: its processes, their group, receivers and a day of backoff, from one seed."""
