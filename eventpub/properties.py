"""Properties of librdkafka and Spark: which may not be set, and which hold a secret."""

from __future__ import annotations

import re

_ONLY_OWN_KEY = "it has a key of its own in [sink]"
_JOINS_NO_GROUP = "eventpub uses no consumer group"
_IS_NO_TEXT = "it is not a property of librdkafka but an argument of its Python client"
_LOG_IS_WATCHED = "the client's log is watched for lost answers of the transaction coordinator"

PROTECTED_PROPERTIES: dict[str, str] = {
    "bootstrap.servers": _ONLY_OWN_KEY,
    "metadata.broker.list": _ONLY_OWN_KEY,
    "transaction.timeout.ms": _ONLY_OWN_KEY,
    "transactional.id": "derived from app.id and the shard's number, to fence the former owner",
    "enable.gapless.guarantee": "transactions give it",
    "partitioner": "the partition is CRC32 of the aggregate's id",
    "delivery.report.only.error": "delivery reports are counted before each commit",
    "isolation.level": "what is read back must be committed",
    "group.id": _JOINS_NO_GROUP,
    "enable.auto.commit": _JOINS_NO_GROUP,
    "enable.auto.offset.store": _JOINS_NO_GROUP,
    "enable.partition.eof": "reading back relies on it to end",
    "auto.offset.reset": "an offset that is gone must be reported, not skipped",
    "default.topic.config": _IS_NO_TEXT,
    "error_cb": _IS_NO_TEXT,
    "logger": _IS_NO_TEXT,
    "oauth_cb": _IS_NO_TEXT,
    "on_commit": _IS_NO_TEXT,
    "on_delivery": _IS_NO_TEXT,
    "stats_cb": _IS_NO_TEXT,
    "throttle_cb": _IS_NO_TEXT,
    "log.queue": _LOG_IS_WATCHED,
    "log_level": _LOG_IS_WATCHED,
}
"""Names that `[sink.properties]` may not set, each with the reason."""


def refused_property(name: str, value: str, delivery: str) -> str | None:  # noqa: PLR0911 (one case a fault)
    """Why a property of `[sink.properties]` would break what `sink.delivery` promises, or None."""
    text = value.strip().lower()
    if name in PROTECTED_PROPERTIES:
        return PROTECTED_PROPERTIES[name]
    if delivery == "at_most_once":
        return None
    match name:
        case "enable.idempotence" if text != "true":
            return "without it a retry repeats or reorders records"
        case "acks" | "request.required.acks" if text not in {"all", "-1"}:
            return "only acks=all survives the loss of a broker"
        case "max.in.flight" | "max.in.flight.requests.per.connection":
            if not (text.isdigit() and 1 <= int(text) <= 5):
                return "more than 5 requests in flight lose the order of an idempotent producer"
        case "retries" | "message.send.max.retries" if text == "0":
            return "without retries a broker's restart loses records"
        case "log.connection.close" if text != "true" and delivery == "exactly_once":
            return _LOG_IS_WATCHED
        case _:
            pass
    return None


_OF_SPARK: dict[str, str] = {
    "spark.master": "it has a key of its own, spark.master",
    "spark.python.daemon.module": "eventpub's own starts the processes of the shards",
    "spark.task.maxFailures": "eventpub itself restarts a lost shard",
}


def refused_spark_property(name: str, value: str) -> str | None:
    if name == "spark.submit.deployMode" and value.strip().lower() != "client":
        return "the publisher's own process is Spark's driver"
    if name == "spark.speculation" and value.strip().lower() != "false":
        return "two attempts of a task would fence each other"
    if not name.startswith("spark."):
        return "Spark ignores names that do not begin with spark."
    return _OF_SPARK.get(name)


SECRET_NAME = (
    r"passw|passphrase|secret|token|credential|private|access\.?key|\.key\.pem|"
    r"oauthbearer\.config|jaas"
)
"""Is found in the names of properties whose values are secret; a regular expression, case
ignored, of Python and of Java."""


FILE_SUFFIX = ".file"
"""`NAME.file` in `[sink.properties]` names the file that holds the value of `NAME`."""
_OF_NO_SECRET = (".location", ".url", FILE_SUFFIX)


def is_secret_property(name: str) -> bool:
    """Whether the value of a librdkafka or Spark property must never be shown."""
    found = re.search(SECRET_NAME, name, re.IGNORECASE)
    return found is not None and not name.endswith(_OF_NO_SECRET)
