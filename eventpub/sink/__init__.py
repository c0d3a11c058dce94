"""The sink: making a batch of admitted events visible atomically, and reading back what is visible.

Knows Kafka, nothing of SQL or Spark. What must hold: a `read_committed` consumer sees each event
once, whatever crashes; the topic is the truth, and `ShardSink.fold` reads it.
"""
