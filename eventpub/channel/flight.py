"""The channel over the network, by Arrow Flight: the same on one machine and on a cluster.

A runner opens one exchange (`DoExchange`): its first message is a `Hello`, then both sides send
`messages` as the metadata of the stream; a window's rows go with it as a record batch. Whether a
lease is still in force is asked by an action. Each call carries the token of the run; without it
nothing is answered. TLS where a certificate is configured.

gRPC does not survive a fork: a client is made in the worker, after it, and whoever serves does not
fork.
"""

from __future__ import annotations

import hmac
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import flight

from eventpub.admission.model import EVENTS
from eventpub.channel.lane import (
    IsCurrent,
    Joined,
    Lane,
    Link,
    Lost,
    Post,
    Received,
    disconnected,
    superseded,
)
from eventpub.channel.messages import (
    Farewell,
    FromRunner,
    Hello,
    Lease,
    MalformedError,
    Stop,
    Window,
    Work,
    decode,
    encode,
)
from eventpub.errors import StateError

_TOKEN = "authorization"

_ALIVE_EVERY = 5.0
"""Seconds between two checks whether a runner that says nothing is still connected."""

_CLOSED = b"closed"
"""The last that a runner is sent where the coordinator ends the connection."""

_ENDS_WITHIN = 0.5
"""Seconds for runners to let go of the connection when the server ends."""

_CALL_TIMEOUT = 10.0
"""Seconds for an action."""

_ASKS_AFTER = 10.0
"""Seconds without a message after which a runner asks whether it is still wanted: a connection that
a network has forgotten says nothing to who only waits."""

_LONGEST_ANSWER = 500
"""Characters of an error that a question gets for an answer: it may repeat the question."""


@dataclass(frozen=True)
class Address:
    """Where a coordinator is reached, and what lets one in.

    Attributes:
        location: as of Flight, ``grpc://host:port`` or ``grpc+tls://host:port``.
        token: of the run.
        root_certificates: PEM, where the server's certificate is of an authority of one's own.
    """

    location: str
    token: str
    root_certificates: str | None = None


@dataclass(frozen=True)
class Tls:
    """A server's certificate and its key, PEM."""

    certificate: str
    key: str


# -- the coordinator's side ------------------------------------------------------------------------


class _Admission(flight.ServerMiddlewareFactory):
    """Lets in who has the token."""

    def __init__(self, token: str) -> None:
        self._token = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        given = [
            value for name, found in headers.items() if name.lower() == _TOKEN for value in found
        ]
        text = given[0] if given else b""
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        if not hmac.compare_digest(raw, self._token):
            raise flight.FlightUnauthenticatedError("the token is not this run's")


class FlightLane(Lane):
    """See `Lane`; written to by the thread that serves the call."""

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello)
        self._sent: queue.SimpleQueue[Lease | Work | None] = queue.SimpleQueue()
        self._is_closed = False

    def send(self, message: Lease | Work) -> None:
        self._sent.put(message)

    def close(self) -> None:
        self._is_closed = True
        self._sent.put(None)

    def messages(self, is_gone: Callable[[], bool]) -> Iterator[Lease | Work]:
        """What is sent, as it comes, until the lane is closed or the other side is gone."""
        while not self._is_closed:
            try:
                found = self._sent.get(timeout=_ALIVE_EVERY)
            except queue.Empty:
                if is_gone():
                    return
                continue
            if found is None:
                return
            yield found


class Server(flight.FlightServerBase):
    """Serves runners and whoever asks, from when it is made, each call in a thread of gRPC's.

    `serve` is not to be called: it would put signal handlers in the place of ours.

    Args:
        host: the address that it is bound to.
        token: lets one in.
        post: takes what happens.
        is_current: see `IsCurrent`.
        tls: None: in the clear, for loopback and networks that are trusted.
        port: 0: any that is free.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        host: str,
        token: str,
        post: Post,
        is_current: IsCurrent,
        *,
        tls: Tls | None = None,
        port: int = 0,
    ) -> None:
        scheme = "grpc" if tls is None else "grpc+tls"
        bare = f"[{host}]" if ":" in host else host
        super().__init__(
            f"{scheme}://{bare}:{port}",
            middleware={"token": _Admission(token)},
            tls_certificates=None if tls is None else [(tls.certificate, tls.key)],
        )
        self._scheme = scheme
        self._post = post
        self._is_current = is_current
        self._lanes: set[FlightLane] = set()
        self._guard = threading.Lock()

    def address(self, host: str, token: str, root_certificates: str | None = None) -> Address:
        """Where others reach it, by the name or address of its machine."""
        bare = f"[{host}]" if ":" in host else host
        return Address(f"{self._scheme}://{bare}:{self.port}", token, root_certificates)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One runner, from its hello to its farewell."""
        try:
            hello = decode(descriptor.command)
        except MalformedError as error:
            raise flight.FlightServerError(str(error)) from error
        if not isinstance(hello, Hello):
            raise flight.FlightServerError("a runner says hello first")
        lane = FlightLane(hello)
        with self._guard:
            self._lanes.add(lane)
        listener = threading.Thread(
            target=self._listen,
            args=(lane, reader),
            name=f"eventpub-lane-{hello.shard}",
            daemon=True,
        )
        try:
            writer.begin(EVENTS)
            self._post(Joined(lane))
            listener.start()
            for message in lane.messages(lambda: bool(context.is_cancelled())):
                rows = message.rows if isinstance(message, Window) else None
                if rows is None:
                    writer.write_metadata(encode(message))
                else:
                    [batch] = rows.combine_chunks().to_batches() or [_NO_ROWS]
                    writer.write_with_metadata(batch, encode(message))
        except (pa.ArrowException, OSError):  # it is gone, which the listener sees as well
            pass
        finally:
            lane.close()
            with suppress(pa.ArrowException, OSError):
                writer.write_metadata(_CLOSED)
            if listener.ident is not None:
                listener.join()  # what it reads from is gone with this call: gRPC would abort
            with self._guard:
                self._lanes.discard(lane)

    def _listen(self, lane: FlightLane, reader: Any) -> None:
        said_farewell = False
        try:
            while True:
                message = decode(reader.read_chunk().app_metadata.to_pybytes())
                if not isinstance(message, FromRunner):
                    return
                said_farewell = isinstance(message, Farewell)
                self._post(Received(lane, message))
                if said_farewell:
                    return
        except (StopIteration, pa.ArrowException, OSError, ValueError, AttributeError):
            pass  # ended, broken, or nonsense: whatever it is, this is no runner any more
        finally:
            if not said_farewell:
                self._post(Lost(lane))
            lane.close()

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Whether a lease is still in force."""
        try:
            if action.type != "confirm":
                raise LookupError(action.type)
            given = json.loads(action.body.to_pybytes() or b"{}")
            answer = {"current": self._is_current(int(given["shard"]), int(given["lease"]))}
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            words = repr(error)[:_LONGEST_ANSWER]
            raise flight.FlightServerError(f"not a question of this version: {words}") from error
        yield json.dumps(answer).encode()

    def end(self) -> None:
        """Close all connections and stop serving."""
        with self._guard:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.close()
        # it waits for all calls to end, and a process that stands still does not end its own
        ends = threading.Thread(target=self.shutdown, name="eventpub-channel-end", daemon=True)
        ends.start()
        ends.join(_ENDS_WITHIN)


_NO_ROWS = pa.RecordBatch.from_pylist([], schema=EVENTS)


# -- the other side --------------------------------------------------------------------------------


def _client(address: Address) -> Any:
    return flight.connect(address.location, tls_root_certs=address.root_certificates)


def _options(address: Address, timeout: float | None = None) -> Any:
    headers: Any = [(_TOKEN.encode(), f"Bearer {address.token}".encode())]
    return flight.FlightCallOptions(headers=headers, timeout=timeout)


def is_in_force(address: Address, shard: int, lease: int) -> bool:
    """Ask the coordinator whether a lease is.

    Raises:
        StateError: run.disconnected
    """
    try:
        with _client(address) as client:
            body = json.dumps({"shard": shard, "lease": lease}).encode()
            action = flight.Action("confirm", body)
            [result] = client.do_action(action, _options(address, _CALL_TIMEOUT))
            return bool(json.loads(result.body.to_pybytes())["current"])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise disconnected(_words(error)) from error


def _words(error: BaseException) -> str:
    text = str(error).splitlines()
    return text[0].split(". gRPC client debug context")[0] if text else type(error).__name__


class FlightLink(Link):
    """A runner's end in another process.

    Args:
        address: the coordinator's.
        hello: who connects.

    Raises:
        StateError: run.disconnected
    """

    def __init__(self, address: Address, hello: Hello) -> None:
        self._address = address
        self._hello = hello
        self._came: queue.SimpleQueue[Lease | Work | StateError | None] = queue.SimpleQueue()
        self._lease = 0
        self._is_stopping = False
        self._has_ended = False
        self._writing = threading.Lock()
        try:
            self._client = _client(address)
            descriptor = flight.FlightDescriptor.for_command(encode(hello))
            self._writer, self._reader = self._client.do_exchange(descriptor, _options(address))
        except (pa.ArrowException, OSError) as error:
            raise disconnected(_words(error)) from error
        self._listener = threading.Thread(
            target=self._listen, name=f"eventpub-link-{hello.shard}", daemon=True
        )
        self._listener.start()

    def _listen(self) -> None:
        try:
            while True:
                chunk = self._reader.read_chunk()
                data = chunk.app_metadata.to_pybytes()
                if data == _CLOSED:
                    raise StopIteration
                message = decode(data)
                if isinstance(message, Window) and chunk.data is not None:
                    rows = pa.Table.from_batches([chunk.data])
                    message = Window(**{**vars(message), "rows": rows})
                if isinstance(message, Stop):
                    self._is_stopping = True
                self._came.put(message)
        except StopIteration:
            self._came.put(disconnected("it was closed"))
        except (pa.ArrowException, OSError, ValueError, AttributeError) as error:
            self._came.put(disconnected(_words(error)))
        finally:
            self._is_stopping = True
            self._end()

    def _end(self) -> None:
        """Say that nothing more comes from here."""
        with self._writing, suppress(pa.ArrowException, OSError):
            if not self._has_ended:
                self._has_ended = True
                self._writer.done_writing()

    def _next(self) -> Lease | Work | None:
        try:
            found = self._came.get(timeout=_ASKS_AFTER)
        except queue.Empty:
            self._ask_whether_wanted()
            return None
        if isinstance(found, StateError):
            self._came.put(found)
            raise found
        return found

    def _ask_whether_wanted(self) -> None:
        """The coordinator may be gone, or the lease another's.

        Raises:
            StateError: run.superseded, run.disconnected
        """
        try:
            if self._lease:
                self.confirm()
            else:
                is_in_force(self._address, self._hello.shard, 0)
        except StateError:
            self._is_stopping = True
            raise

    def wake(self) -> None:
        self._came.put(None)

    def send(self, message: FromRunner) -> None:
        data = encode(message)
        try:
            with self._writing:
                if self._has_ended:
                    raise disconnected("it was closed")
                self._writer.write_metadata(data)
        except (pa.ArrowException, OSError) as error:
            raise disconnected(_words(error)) from error

    def confirm(self) -> None:
        if not is_in_force(self._address, self._hello.shard, self._lease):
            raise superseded(self._hello.shard)

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def close(self) -> None:
        """End the connection."""
        self._end()
        self._listener.join(1.0)
        with suppress(pa.ArrowException, OSError):
            self._client.close()
