"""A Kafka broker inside this process: librdkafka's mock cluster, with injected errors.

The wheel of confluent-kafka carries librdkafka as a shared library that exports `rd_kafka_mock_*`;
ctypes makes the cluster, and the ordinary clients connect to its address. It answers what it is
told to answer, at once or late, and counts the requests that it was sent.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka

PRODUCE, FETCH, METADATA = 0, 1, 3
FIND_COORDINATOR, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 10, 22, 24, 26

_PRODUCER = 0


def library_path() -> Path | None:
    """librdkafka of the installed wheel; None where it is linked otherwise."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    return next(iter(sorted(folder.glob("librdkafka*.so*"))), None)


class MockCluster:
    """A cluster of one broker, the coordinator of every transaction; or of more of them."""

    def __init__(self, topics: dict[str, int], brokers: int = 1) -> None:
        path = library_path()
        assert path is not None
        self._lib = lib = ctypes.CDLL(str(path))
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(lib, name).restype = ctypes.c_void_p
        lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        lib.rd_kafka_mock_get_requests.restype = ctypes.POINTER(ctypes.c_void_p)
        lib.rd_kafka_mock_request_api_key.restype = ctypes.c_int16
        error = ctypes.create_string_buffer(512)
        client = lib.rd_kafka_new(
            _PRODUCER, ctypes.c_void_p(lib.rd_kafka_conf_new()), error, len(error)
        )
        assert client, error.value
        self._client = ctypes.c_void_p(client)
        self._cluster = ctypes.c_void_p(lib.rd_kafka_mock_cluster_new(self._client, brokers))
        for topic, partitions in topics.items():
            lib.rd_kafka_mock_topic_create(self._cluster, topic.encode(), partitions, 1)
        lib.rd_kafka_mock_start_request_tracking(self._cluster)

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients."""
        address: bytes = self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster)
        return address.decode()

    def answer(self, api: int, *answers: tuple[int, int]) -> None:
        """The next answers to requests of a kind: (error code, delay in ms), one each.

        Error 0 is the true answer, late; the error -195 (`_TRANSPORT`) cuts the connection.
        """
        arguments: list[ctypes.c_int] = []
        for error, delay in answers:
            arguments += [ctypes.c_int(error), ctypes.c_int(delay)]
        result = self._lib.rd_kafka_mock_broker_push_request_error_rtts(
            self._cluster,
            ctypes.c_int32(1),
            ctypes.c_int16(api),
            ctypes.c_size_t(len(answers)),
            *arguments,
        )
        assert result == 0

    def down(self) -> None:
        """The broker cannot be reached any more."""
        self._lib.rd_kafka_mock_broker_set_down(self._cluster, ctypes.c_int32(1))

    def up(self) -> None:
        """The broker is back."""
        self._lib.rd_kafka_mock_broker_set_up(self._cluster, ctypes.c_int32(1))

    def lead(self, topic: str, partition: int, broker: int) -> None:
        """Another broker leads this partition from now on."""
        self._lib.rd_kafka_mock_partition_set_leader(
            self._cluster, topic.encode(), ctypes.c_int32(partition), ctypes.c_int32(broker)
        )

    def hang(self, broker: int) -> None:
        """It takes requests, and answers in a minute."""
        self._lib.rd_kafka_mock_broker_set_rtt(
            self._cluster, ctypes.c_int32(broker), ctypes.c_int(60_000)
        )

    def topic_error(self, topic: str, error: int) -> None:
        """What the broker says of a topic from now on; 0 is that all is well."""
        self._lib.rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), ctypes.c_int(error))

    def forget_requests(self) -> None:
        """Counts from zero again."""
        self._lib.rd_kafka_mock_clear_requests(self._cluster)

    def requests(self, api: int) -> int:
        """How many requests of a kind have come."""
        count = ctypes.c_size_t()
        found = self._lib.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(count))
        keys = [
            self._lib.rd_kafka_mock_request_api_key(ctypes.c_void_p(found[i]))
            for i in range(count.value)
        ]
        self._lib.rd_kafka_mock_request_destroy_array(found, count)
        return keys.count(api)

    def close(self) -> None:
        """Ends the cluster."""
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)
