"""Twins in memory of what a shard reaches through a protocol."""
