"""The edge: who calls, what they may send and for how long, how failures leave. It knows nothing of Kafka."""
