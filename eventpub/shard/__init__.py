"""One shard's way through its work; `runner` is an event's whole way, from top to bottom.

The only package that knows store, admission, index and sink together. It does not know Spark, other
shards, nor who runs it.
"""
