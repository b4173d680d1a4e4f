"""Sends a request as Avro, by Confluent's serializer with its default settings, to a topic of Penstock.

usage: python avro_request.py BOOTSTRAP_SERVERS GATEWAY_URL TOPIC REQUEST_ID
Needs confluent-kafka[avro,schemaregistry] and nothing of Penstock.
"""

import sys
import time

from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

bootstrap, gateway, topic, request_id = sys.argv[1:]
registry = SchemaRegistryClient({"url": f"{gateway}/registry"})
schema = registry.get_latest_version(f"{topic}-value").schema
serialize = AvroSerializer(registry, schema.schema_str)
request = {
    "request_id": request_id,
    "task": "text_generation",
    "text_generation": {"prompt": "Hello"},
    "metadata": {"correlation_id": "from-avro"},
    "created_at": int(time.time() * 1000),
}
producer = Producer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
producer.produce(topic, serialize(request, SerializationContext(topic, MessageField.VALUE)), key=request_id)
if producer.flush(30):
    sys.exit("the broker did not take the request")
