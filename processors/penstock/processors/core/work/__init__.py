"""The values that pass between the rooms: a request, its state, what was published of it, the policy of its retries."""
