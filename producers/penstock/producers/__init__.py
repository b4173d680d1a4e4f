"""The client library of Penstock, and the Kafka layer that worker, gateway and command line stand on.

Light: it loads neither torch nor FastAPI nor Faust.
"""

from penstock.producers.settings import KafkaSettings

__all__ = ["KafkaSettings"]
