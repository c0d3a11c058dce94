"""Servers and writers that only tests and measurements start: clusters, replicas, load, relays."""

from tests.servers.cluster import KafkaCluster, kafka_cluster
from tests.servers.replication import Replica, replica_of, replicating

__all__ = ["KafkaCluster", "Replica", "kafka_cluster", "replica_of", "replicating"]
