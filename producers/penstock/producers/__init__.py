"""The client library of Penstock: what other services import to submit requests and to follow them over Kafka.

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
