"""The worker: requests from Kafka through intake and admission to the engines, results back to Kafka."""
