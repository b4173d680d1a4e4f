"""What the topics say: followed, folded in memory, written behind to a file, told to subscribers. No HTTP."""
