"""What the topics say: followed, folded in memory, written behind to a file, published to subscribers. No HTTP."""
