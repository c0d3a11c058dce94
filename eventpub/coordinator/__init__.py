"""What one publisher decides once for all shards; pure, except that a worker uses `boundary`."""
