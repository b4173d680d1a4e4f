"""The bridge: a process that makes requests of the messages of other systems' queues and writes their answers back."""
