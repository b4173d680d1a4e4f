"""The worker and Kafka: membership of the group, intake, publishing, control commands, the crash journal."""
