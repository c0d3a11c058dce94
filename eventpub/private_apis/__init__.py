"""Uses of other libraries' private parts, for speed or for facts not available otherwise.

    bulk         where confluent-kafka keeps librdkafka's handle.
                 Self-check: the version, and librdkafka itself. Else: record by record.
    bulk         how librdkafka words its log.
                 Self-check: each commit must show. Else: each commit is in doubt.
    packets      PyMySQL's socket.
                 Self-check: its names, and a known answer. Else: store.client_unknown.
    task_input   the stream of Spark's Python workers.
                 Self-check: it is found. Else: sink.spark_unknown.

If a self-check fails, the result is the same but slower, or an error says so.
"""
