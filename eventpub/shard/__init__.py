"""Publishes one shard; `runner` shows an event's whole way.

The only package that knows store, admission, index and sink together. It knows neither Spark nor
other shards nor its caller.
"""
