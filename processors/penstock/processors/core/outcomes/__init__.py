"""How requests end: their answers, outcomes and dead letters, and what became durable of them."""
