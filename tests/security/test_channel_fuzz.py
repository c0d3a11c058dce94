"""The channel is sent what no runner sends, with the run's token and without, while a publisher
publishes: it goes on, does not grow, and has no traceback to show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import flight

from eventpub.admission import EVENTS
from eventpub.channel import Farewell, Folding, Hello, Lease, Report, Request, Stop, Window
from eventpub.channel.flight import _Admission, is_in_force
from eventpub.channel.messages import MalformedError, decode, encode, request_of
from eventpub.errors import StateError, StoreError
from tests.channel.ends import TOKEN, Coordinator, serving
from tests.channel.test_flight import _reads_to_the_end
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, insert

ROOT = Path(__file__).parents[2]

# -- decode ----------------------------------------------------------------------------------------

_json: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0", "x" * 1000, "list", "skip"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_VALID = [
    Hello(0, 1),
    Lease(1, 0, 0),
    Window(1, 2),
    Request("x", "retry", "a", 1, 2),
    Stop(),
    Report(0),
    Folding(1, 2),
    Farewell(),
    Farewell(StoreError("store.unreachable", "away")),
]
_MUTATIONS = st.tuples(
    st.sampled_from(_VALID),
    st.dictionaries(st.integers(0, 40), _json, min_size=1, max_size=3),
    st.booleans(),
)


def mutated(what: tuple[Any, dict[int, Any], bool]) -> bytes:
    """A message of which some fields hold something else, or are not there."""
    message, changes, removes = what
    data: dict[str, Any] = json.loads(encode(message))
    names = ["is", *(f.name for f in fields(message))]
    for number, value in changes.items():
        name = names[number % len(names)]
        if removes:
            data.pop(name, None)
        else:
            data[name] = value
    return json.dumps(data).encode()


@given(_MUTATIONS)
@settings(max_examples=300)
def test_a_message_with_other_values_is_refused_or_is_of_the_right_types(what: Any) -> None:
    try:
        found = decode(mutated(what))
    except MalformedError:
        return
    if not isinstance(found, Farewell):
        assert decode(encode(found)) == found
    if isinstance(found, Report):
        assert all(type(n) is int for n in (found.shard, found.done, found.position, found.low))
        assert all(type(n) is int for n in found.offsets.values())
        assert all(type(n) is int for n in vars(found.counts).values())
    elif isinstance(found, Hello):
        assert all(type(n) is int for n in (found.shard, found.run, found.attempt))
        assert isinstance(found.where, str)


HOSTILE = {
    "nested too deeply": b"[" * 100_000,
    "nested too deeply within": b'{"is": "Report", "skipped": ' + b'[{"a": ' * 50_000,
    "a number of many digits": b'{"is": "Hello", "shard": ' + b"9" * 10_000 + b', "run": 1}',
    "a number beyond 64 bits": b'{"is": "Hello", "shard": 9223372036854775808, "run": 1}',
    "a truth for a number": b'{"is": "Hello", "shard": true, "run": 1}',
    "a fraction for a number": b'{"is": "Hello", "shard": 0.5, "run": 1}',
    "not a number": b'{"is": "Folding", "read": NaN, "left": 0}',
    "no text": b'{"is": "Hello", "shard": 0, "run": 1, "where": {"a": 1}}',
    "a position that is text": json.dumps(
        json.loads(encode(Report(0))) | {"position": "2026"}
    ).encode(),
    "an error that is none": json.dumps(
        {
            "is": "Farewell",
            "error": {"type": "StateError", "code": [], "message": {}}
            | dict.fromkeys(("where", "suggestion", "retriable")),
        }
    ).encode(),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_what_is_hostile_is_refused(how: str) -> None:
    with pytest.raises(MalformedError) as error:
        decode(HOSTILE[how])
    assert len(str(error.value)) < 600


GOOD = asdict(Request("r", "retry", "a"))


@pytest.mark.parametrize(
    "change",
    [
        {"action": "drop"},
        {"action": ["retry"]},
        {"aggregate_id": None},
        {"aggregate_id": "\udcff"},
        {"id": 7},
        {"version": "1"},
        {"version": 2**63},
        {"to_version": 1.5},
        {"colour": "red"},
    ],
)
def test_a_request_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    assert request_of(GOOD) == Request("r", "retry", "a")
    with pytest.raises(MalformedError):
        request_of(GOOD | change)


@given(_json)
def test_whatever_is_given_for_a_request_is_one_or_refused(what: Any) -> None:
    with suppress(MalformedError):
        assert isinstance(request_of(what), Request)


# -- a server --------------------------------------------------------------------------------------


def options(token: bytes | None, timeout: float = 10.0) -> Any:
    """Of a call with this token."""
    headers: Any = [] if token is None else [(b"authorization", b"Bearer " + token)]
    return flight.FlightCallOptions(headers=headers, timeout=timeout)


KINDS = ["do_get", "do_put", "do_exchange", "do_action", "list_flights", "get_flight_info"]
KINDS += ["get_schema", "list_actions"]


def call(client: Any, kind: str, word: bytes, name: str, with_options: Any) -> None:
    """One call of a kind with a word in the place where a call has one; reads its answer."""
    descriptor = flight.FlightDescriptor.for_command(word)
    if kind == "do_get":
        client.do_get(flight.Ticket(word), with_options).read_all()
    elif kind == "do_put":
        writer, reader = client.do_put(descriptor, EVENTS, with_options)
        with writer:
            writer.write_metadata(word)
            writer.done_writing()
            reader.read()
    elif kind == "do_exchange":
        writer, reader = client.do_exchange(descriptor, with_options)
        with writer:
            writer.write_metadata(word)
            writer.done_writing()
            while True:
                reader.read_chunk()
    elif kind == "do_action":
        list(client.do_action(flight.Action(name, word), with_options))
    elif kind == "list_flights":
        list(client.list_flights(word, with_options))
    elif kind == "list_actions":
        list(client.list_actions(with_options))
    else:
        getattr(client, kind)(descriptor, with_options)


def answer(client: Any, *arguments: Any) -> BaseException | None:
    """The error of a call, which is one of Flight's."""
    try:
        call(client, *arguments)
    except (pa.ArrowException, OSError, StopIteration, NotImplementedError) as error:
        return error
    return None


def is_refused(error: BaseException | None) -> bool:
    """For the token; a `DoPut` says so by another class."""
    return "Unauthenticated" in f"{error!r}"


def fails(error: BaseException | None) -> bool:
    """Or refused otherwise: a server need not read all of what a stranger sends."""
    return isinstance(error, OSError | pa.ArrowException)


STRANGERS = [None, b"", b"another", TOKEN.encode() + b"s", TOKEN.encode()[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_of_any_kind_is_answered_without_the_token(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator = Coordinator()
    with serving(coordinator) as server:
        location = server.address("127.0.0.1", TOKEN).location
        with flight.connect(location) as client:
            for token in STRANGERS:
                error = answer(client, kind, encode(Hello(0, 1)), "status", options(token))
                assert is_refused(error), (token, error)
            error = answer(client, kind, b"\0\xff", "status", options(TOKEN.encode()))
            assert error is not None or kind == "list_actions"
        assert coordinator.nothing_happens()
    assert "Traceback" not in capfd.readouterr().err


_SERVES = """
import sys
from tests.channel.ends import Coordinator, serving
with serving(Coordinator()) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "most"), [("do_exchange", 10), ("do_put", 10), ("do_action", 90)])
def test_what_a_stranger_sends_costs_as_much_memory_as_is_documented(kind: str, most: int) -> None:
    """A stream is not read before its token is checked; a question is (docs/security.md)."""
    command = [sys.executable, "-c", _SERVES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as process:
        assert process.stdout is not None

        def peak() -> int:
            text = Path(f"/proc/{process.pid}/status").read_text()
            return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) // 1000

        with flight.connect(f"grpc://127.0.0.1:{int(process.stdout.readline())}") as client:
            assert answer(client, kind, b"x", "status", options(b"another")) is not None
            before = peak()
            error = answer(client, kind, b"x" * 30_000_000, "status", options(b"another", 60.0))
        assert fails(error), error
        assert peak() - before < most, "MB"
        assert process.stdin is not None
        process.stdin.close()


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("eventpub.channel.flight.hmac.compare_digest", compare_digest)
    with serving(Coordinator()) as server:
        address = server.address("127.0.0.1", "almost")
        with pytest.raises(StateError):
            is_in_force(address, 0, 1)
    assert compared == [(b"Bearer almost", b"Bearer " + TOKEN.encode())]


@pytest.mark.parametrize("given", ["ä", "\udcff", b"\xff\xfe", "", b""])
def test_a_token_that_is_no_ascii_is_another_token(given: str | bytes) -> None:
    """gRPC's clients send none, others may."""
    admission = _Admission(TOKEN)
    with pytest.raises(flight.FlightUnauthenticatedError):
        admission.start_call(None, {"Authorization": [given]})
    admission.start_call(None, {"Authorization": [f"Bearer {TOKEN}"]})


QUESTIONS = {
    "nested too deeply": b"[" * 100_000,
    "no object": b"[]",
    "numbers without end": b'{"shard": 1e400, "lease": 1}',
}


@pytest.mark.parametrize("how", QUESTIONS)
@pytest.mark.parametrize("name", ["confirm", "status"])
def test_a_hostile_question_is_refused_and_reaches_nobody(
    how: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coordinator = Coordinator()
    with serving(coordinator) as server, flight.connect(f"grpc://127.0.0.1:{server.port}") as c:
        error = answer(c, "do_action", QUESTIONS[how], name, options(TOKEN.encode()))
        assert isinstance(error, flight.FlightServerError), error
        assert "not a question of this version" in str(error)
    assert coordinator.nothing_happens()
    assert "Traceback" not in capfd.readouterr().err


def test_a_hostile_word_of_a_runner_ends_its_connection_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A number that was too deeply nested ended the thread that listens with a traceback."""
    coordinator = Coordinator()
    with serving(coordinator) as server, flight.connect(f"grpc://127.0.0.1:{server.port}") as c:
        for word in [*HOSTILE.values(), encode(Stop()), encode(Lease(1, 0, 0))]:
            descriptor = flight.FlightDescriptor.for_command(encode(Hello(0, 1)))
            writer: Any
            writer, reader = c.do_exchange(descriptor, options(TOKEN.encode()))
            lane = coordinator.joined()
            writer.write_metadata(word)
            assert _reads_to_the_end(reader)
            event = coordinator.events.get(timeout=20)
            assert getattr(event, "lane", None) is lane
            assert type(event).__name__ == "Lost"
            with suppress(pa.ArrowException):
                writer.close()
    assert "Traceback" not in capfd.readouterr().err


# -- a publisher -----------------------------------------------------------------------------------


def test_an_id_that_is_no_text_is_refused_and_the_publisher_publishes_on(
    publisher: Publisher, database: FreshDatabase
) -> None:
    """As a shell passes bytes that are no UTF-8: `eventpub gaps retry $'\\xff'`."""
    publisher.start()
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, "a", 1)
        publisher.until_published("a", [1])
        done = publisher.command("gaps", "retry", "\udcff", "--json")
        assert done.returncode
        assert "Traceback" not in done.stderr, done.stderr
        insert(cursor, "a", 2)
    publisher.until_published("a", [1, 2])
    assert publisher.stop() == 143
    assert "Traceback" not in publisher.log.read_text()
