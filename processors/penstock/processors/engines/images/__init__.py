"""Images: made, edited, processed and described."""
