"""The client library of Penstock, and the Kafka layer that worker, gateway and command line stand on.

Light: it loads neither torch nor FastAPI nor Faust.
"""

from penstock.common.settings import KafkaSettings
from penstock.producers.aio import AsyncClient
from penstock.producers.client import Client
from penstock.producers.core import Submitted
from penstock.producers.events import Chunk, Event, Preview, Progress, Restarted, Result, Status

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "Event",
    "KafkaSettings",
    "Preview",
    "Progress",
    "Restarted",
    "Result",
    "Status",
    "Submitted",
]
