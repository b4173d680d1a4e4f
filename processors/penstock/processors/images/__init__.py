"""Images: how they come in (fetched, decoded under guard) as pixels that engines read."""
