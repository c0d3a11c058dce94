"""Passes many events to librdkafka at once, from Arrow's memory, without a Python object for each.

`Producer.produce` costs 3 µs more of an event's 9 µs of CPU. Here NumPy fills the arguments of many
`rd_kafka_produceva` calls with addresses in Arrow's buffers. The handle is private to
confluent-kafka's `Producer`, so this is done only with a known version's own wheel, once librdkafka
confirms that the handle is that object's; else `bulk_of` returns None and records are produced
one by one, with the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer

if TYPE_CHECKING:
    from eventpub.sink.records import FixedEvents

WORTHWHILE = 64
_KNOWN = ("2.16.",)
"""Versions of confluent-kafka whose `Producer` has librdkafka's handle first."""
_CHUNK = 500
"""Records whose arrays are filled at once: half a megabyte, to stay in a core's cache."""

# rd_kafka_vu_t, from rdkafka.h: what a value is, and a union of 64 bytes
_VALUE = np.dtype(
    {
        "names": ["what", "first", "second", "third"],
        "formats": ["i4", "u8", "u8", "i8"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 72,
    }
)
_TOPIC, _PARTITION, _VALUE_BYTES, _KEY, _MSGFLAGS, _TIMESTAMP, _HEADER = 1, 3, 4, 5, 7, 8, 9
_PARTS = (_TOPIC, _MSGFLAGS, _PARTITION, _VALUE_BYTES, _KEY, _TIMESTAMP)
"""Arguments of a record, in this order; its headers follow."""
_AT = {what: at for at, what in enumerate(_PARTS)}
_COPY = 0x2

log = logging.getLogger("eventpub.sink")


class Bulk:
    def __init__(self, producer: Producer, library: Any, handle: int) -> None:
        self._producer = producer  # keeps the handle alive
        self._library = library
        self._handle = handle

    def produce(self, topic: str, events: FixedEvents, rows: npt.NDArray[np.int64]) -> int:
        """Queue these rows in order, without delivery reports; returns how many fit in the queue.

        Raises:
            KafkaException: the client refuses one; those before it are queued.
        """
        if not len(rows):
            return 0
        columns = {_VALUE_BYTES: _Column(events.values), _KEY: _Column(events.keys)}
        headers = [
            value if isinstance(value, bytes) else _Column(value) for _, value in events.headers
        ]
        kept = [_text(topic), *(_text(name) for name, _ in events.headers)]
        constants = [value for value in headers if isinstance(value, bytes)]
        held = {value: ctypes.create_string_buffer(value) for value in constants}
        width = len(_PARTS) + len(headers)
        counts = width - np.asarray(events.headers[-1][1].is_null())  # without one that is null
        chunk = min(_CHUNK, len(rows))
        made = np.zeros((chunk, width), _VALUE)
        made["what"] = [*_PARTS, *[_HEADER] * len(headers)]
        made["first"][:, _AT[_TOPIC]] = ctypes.addressof(kept[0])
        made["first"][:, _AT[_MSGFLAGS]] = _COPY
        made["first"][:, len(_PARTS) :] = [ctypes.addressof(name) for name in kept[1:]]
        for number, header in enumerate(headers, len(_PARTS)):
            if isinstance(header, bytes):
                made["second"][:, number] = ctypes.addressof(held[header])
                made["third"][:, number] = len(header)
        step = width * _VALUE.itemsize
        addresses = range(made.ctypes.data, made.ctypes.data + chunk * step, step)

        for begin in range(0, len(rows), chunk):
            some = rows[begin : begin + chunk]
            first, second, third = (
                made[name][: len(some)] for name in ("first", "second", "third")
            )
            first[:, _AT[_PARTITION]] = events.partitions[some]
            first[:, _AT[_TIMESTAMP]] = events.timestamps[some]
            for what, column in columns.items():
                first[:, _AT[what]] = column.addresses[some]
                second[:, _AT[what]] = column.sizes[some]
            for number, header in enumerate(headers, len(_PARTS)):
                if not isinstance(header, bytes):
                    second[:, number] = header.addresses[some]
                    third[:, number] = header.sizes[some]
            done = self._queue(addresses[: len(some)], counts[some].tolist())
            if done < len(some):
                return begin + done
        return len(rows)

    def _queue(self, addresses: Sequence[int], counts: list[int]) -> int:
        left = iter(addresses)
        calls = map(self._library.rd_kafka_produceva, repeat(self._handle), left, counts)
        error = next(filter(None, calls), None)  # no line of Python runs between two records
        if error is None:
            return len(addresses)
        try:
            code = self._library.rd_kafka_error_code(error)
            text = self._library.rd_kafka_error_string(error).decode()
            is_fatal = bool(self._library.rd_kafka_error_is_fatal(error))
        finally:
            self._library.rd_kafka_error_destroy(error)
        if code != KafkaError._QUEUE_FULL:
            raise KafkaException(KafkaError(code, text, is_fatal))
        return len(addresses) - len(list(left)) - 1


class _Column:
    _empty = ctypes.create_string_buffer(1)  # an address of 0 would mean no value

    def __init__(self, array: Any) -> None:
        large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
        _, offsets, data = array.buffers()
        kind = np.dtype(np.int64 if large else np.int32)
        begin = array.offset * kind.itemsize
        ends = np.frombuffer(offsets, kind, len(array) + 1, begin)
        ends = ends.astype(np.int64)
        self._array = array  # keeps the buffers alive
        self.sizes = np.diff(ends)
        self.addresses = ends[:-1].astype(np.uint64)
        self.addresses += np.uint64(0 if data is None else data.address)
        self.addresses[self.sizes == 0] = ctypes.addressof(self._empty)
        if array.null_count:
            none = np.asarray(array.is_null())
            self.addresses[none], self.sizes[none] = 0, 0


def _text(text: str) -> Any:
    return ctypes.create_string_buffer(text.encode())


def bulk_of(producer: Any) -> Bulk | None:
    """The fast path into this producer; None if it is not known to be safe."""
    library = _library()
    if library is None or type(producer) is not Producer:
        return None
    handle = ctypes.c_void_p.from_address(id(producer) + object.__basicsize__).value
    if handle is None or library.rd_kafka_opaque(handle) != id(producer):
        return None
    return Bulk(producer, library, handle)


@cache
def _library() -> Any:
    """The librdkafka that confluent-kafka has loaded; None if its version is unknown."""
    version = importlib.metadata.version("confluent-kafka")
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    paths = sorted(folder.glob("librdkafka*.so*"))
    is_known = (
        version.startswith(_KNOWN)
        and sys.implementation.name == "cpython"
        and getattr(sys, "_is_gil_enabled", lambda: True)()
        and len(paths) == 1
    )
    try:
        # with the lock of Python held: a call takes a microsecond, and giving it up another
        library = ctypes.PyDLL(str(paths[0]), os.RTLD_NOW | os.RTLD_NOLOAD) if is_known else None
    except OSError:
        library = None
    if library is None:
        log.info("producing records one by one: no fast path for confluent-kafka %s", version)
        return None
    library.rd_kafka_opaque.argtypes = [ctypes.c_void_p]
    library.rd_kafka_opaque.restype = ctypes.c_void_p
    library.rd_kafka_produceva.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.rd_kafka_produceva.restype = ctypes.c_void_p
    library.rd_kafka_error_code.argtypes = [ctypes.c_void_p]
    library.rd_kafka_error_string.argtypes = [ctypes.c_void_p]
    library.rd_kafka_error_string.restype = ctypes.c_char_p
    library.rd_kafka_error_is_fatal.argtypes = [ctypes.c_void_p]
    library.rd_kafka_error_destroy.argtypes = [ctypes.c_void_p]
    library.rd_kafka_error_destroy.restype = None
    return library


_LOST_ANSWER = frozenset({"REQTMOUT", "FAIL"})
_NAME_AT_END = re.compile(r"\((\w+)[^()]*\)\s*$")


class TransactionLog:
    """librdkafka's log of a transaction: it silently repeats a lost `EndTxn`.

    A commit whose `EndTxn` the log does not show proves that the log is worded differently.
    """

    def __init__(self) -> None:
        self._lost_answer = False
        self._ends_sent = 0
        self._ends_answered = 0
        self.transaction_error: KafkaError | None = None

    def forget(self) -> None:
        self._lost_answer = False
        self._ends_sent = self._ends_answered = 0
        self.transaction_error = None

    def note(self, facility: str, text: str) -> None:
        if facility == "SEND":
            self._ends_sent += "Sent EndTxnRequest" in text
        elif facility == "RECV":
            self._ends_answered += "Received EndTxnResponse" in text
        elif facility in _LOST_ANSWER and ("TxnCoordinator" in text or "EndTxn" in text):
            self._lost_answer = True
        elif facility == "TXNERR" and (name_at_end := _NAME_AT_END.search(text)):
            code = getattr(KafkaError, name_at_end[1], KafkaError._FAIL)
            # the first is the cause; a failing abort would hide it
            self.transaction_error = self.transaction_error or KafkaError(code, text)

    @property
    def is_strange(self) -> bool:
        """After a commit: the log does not show it, so it proves nothing."""
        return not self._ends_sent

    @property
    def in_doubt(self) -> bool:
        """Whether an `EndTxn` is unanswered."""
        return self._lost_answer or self._ends_sent > self._ends_answered
