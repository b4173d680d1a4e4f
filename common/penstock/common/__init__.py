"""What worker, gateway, client library and command line share: Kafka's clients, configuration, artifacts, models."""
