"""The worker: requests from Kafka through the gate and admission to the engines, results back to Kafka."""
