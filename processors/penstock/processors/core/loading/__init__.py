"""Which models are loaded, drained and unloaded when, and what that means for the requests that wait for them."""
