"""The sink: publishes a batch atomically, and reads back what is visible. No SQL, no Spark.

A `read_committed` consumer sees each event once, whatever crashes. The topic is the truth;
`ShardSink.fold` reads it.
"""
