"""The channel over the network, on real gRPC: who is let in, and what comes of those that are not
what they should be, stand still, or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from eventpub.admission import EVENTS
from eventpub.channel import Farewell, Hello, Lease, Report, Stop, Window
from eventpub.channel.flight import Address, FlightLink, Server, Tls, is_in_force
from eventpub.channel.lane import Joined, Lost, Received
from eventpub.channel.messages import encode
from eventpub.errors import StateError
from tests.certificates import Authority, Files
from tests.channel.ends import TOKEN, Coordinator, failure, serving, until
from tests.tcp_proxy import TcpProxy

HELLO = Hello(0, 7, "here")
LEASE = Lease(1, low=0, position=0)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def server(coordinator: Coordinator) -> Iterator[Server]:
    with serving(coordinator) as serves:
        yield serves


@pytest.fixture
def address(server: Server) -> Address:
    return server.address("127.0.0.1", TOKEN)


@contextmanager
def linked(address: Address, hello: Hello = HELLO) -> Iterator[FlightLink]:
    link = FlightLink(address, hello)
    try:
        yield link
    finally:
        link.close()


@contextmanager
def raw(address: Address, command: bytes) -> Iterator[tuple[Any, Any]]:
    """An exchange of bytes, by who knows the token and nothing of our messages."""
    headers: Any = [(b"authorization", f"Bearer {address.token}".encode())]
    with flight.connect(address.location) as client:
        descriptor = flight.FlightDescriptor.for_command(command)
        writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(headers=headers))
        yield writer, reader
        with suppress(pa.ArrowException):
            writer.done_writing()


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One of `tests.channel.client`, and the first line that it prints."""
    command = [sys.executable, "-m", "tests.channel.client", *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def is_served(address: Address, coordinator: Coordinator) -> bool:
    """Whether another runner gets a lease and is heard."""
    with linked(address, Hello(3, 7)) as link:
        while not isinstance(event := coordinator.events.get(timeout=20.0), Joined):
            pass
        event.lane.send(LEASE)
        lease = link.lease()
        link.send(Farewell())
        while not isinstance(received := coordinator.events.get(timeout=20.0), Received):
            pass
        return lease == LEASE and received.message == Farewell()


def refusal(address: Address) -> StateError:
    """What a runner is told that gets no lease there."""
    with pytest.raises(StateError) as error, linked(address) as link:
        link.lease()
    return error.value


class TestWhoIsLetIn:
    @pytest.mark.parametrize("token", ["", "another", TOKEN + "s", "ä"])
    def test_nobody_without_the_token_of_the_run(
        self, coordinator: Coordinator, address: Address, token: str
    ) -> None:
        stranger = Address(address.location, token)
        with pytest.raises(StateError) as error:
            is_in_force(stranger, 0, 1)
        assert error.value.code == "run.disconnected"
        assert refusal(stranger).code == "run.disconnected"
        assert coordinator.nothing_happens()

    def test_nor_without_any(self, coordinator: Coordinator, address: Address) -> None:
        with flight.connect(address.location) as client:
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("status", b"{}")))
            descriptor = flight.FlightDescriptor.for_command(encode(HELLO))
            with pytest.raises(flight.FlightUnauthenticatedError):
                client.do_exchange(descriptor)[1].read_chunk()
        assert coordinator.nothing_happens()

    def test_a_token_is_in_no_message_of_what_went_wrong(self, address: Address) -> None:
        with pytest.raises(StateError) as error:
            is_in_force(Address(address.location, "a secret of another run"), 0, 1)
        assert "secret" not in str(error.value)
        assert TOKEN not in str(error.value)


def _reads_to_the_end(reader: Any) -> bool:
    while True:
        try:
            reader.read_chunk()
        except (StopIteration, pa.ArrowException):
            return True


class TestNonsense:
    @pytest.mark.parametrize(
        "hello", [b"", b"\0\xff", encode(Stop()), b'{"is": "Hello", "shard": "x", "run": 1}']
    )
    def test_as_the_first_word_is_refused_and_others_are_served(
        self, coordinator: Coordinator, address: Address, hello: bytes
    ) -> None:
        with raw(address, hello) as (_, reader), pytest.raises(pa.ArrowException):
            reader.read_chunk()
        assert coordinator.nothing_happens()
        assert is_served(address, coordinator)

    @pytest.mark.parametrize(
        "word", [b"\0\xff", b"{}", b'{"is": "Report", "of": "a later version"}', encode(HELLO)[:-3]]
    )
    def test_as_a_later_word_ends_that_connection_alone(
        self, coordinator: Coordinator, address: Address, word: bytes
    ) -> None:
        with linked(address, Hello(5, 7)) as other:
            kept = coordinator.joined()
            with raw(address, encode(HELLO)) as (writer, reader):
                lane = coordinator.joined()
                writer.write_metadata(word)
                assert coordinator.next(Lost).lane is lane
                assert _reads_to_the_end(reader)
            kept.send(LEASE)
            assert other.lease() == LEASE
        assert coordinator.next(Lost).lane is kept
        assert is_served(address, coordinator)

    def test_that_was_to_be_sent_ends_that_connection(
        self, coordinator: Coordinator, address: Address
    ) -> None:
        with linked(address) as link:
            lane: Any = coordinator.joined()
            lane.send("no message")
            assert failure(link.receive).code == "run.disconnected"
            assert coordinator.next(Lost).lane is lane

    @pytest.mark.parametrize("body", [b"\0\xff", b"[]", b'{"shard": "x"}', b'{"shard": 1}'])
    def test_as_a_question_is_refused(self, address: Address, body: bytes) -> None:
        headers: Any = [(b"authorization", f"Bearer {TOKEN}".encode())]
        options = flight.FlightCallOptions(headers=headers)
        with flight.connect(address.location) as client, pytest.raises(flight.FlightServerError):
            list(client.do_action(flight.Action("confirm", body), options))


class TestWhoDies:
    def test_a_runner_whose_connection_is_forgotten_on_the_way_leaves(
        self, coordinator: Coordinator, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing comes, and nothing ends: a firewall, or a machine without power."""
        monkeypatch.setattr("eventpub.channel.flight._ASKS_AFTER", 0.3)
        direct = server.address("127.0.0.1", TOKEN)
        coordinator.leases = {(0, 1)}
        with TcpProxy(int(direct.location.rpartition(":")[2])) as proxy:
            through = replace(direct, location=f"grpc://127.0.0.1:{proxy.port}")
            with linked(through) as link:
                coordinator.joined().send(LEASE)
                assert link.lease() == LEASE
                assert link.receive() is None, "it is still wanted"
                proxy.target = None
                proxy.swallow()
                assert failure(link.receive).code == "run.disconnected"
                assert link.is_stopping

    def test_and_one_whose_shard_is_another_s_by_now(
        self, coordinator: Coordinator, address: Address, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eventpub.channel.flight._ASKS_AFTER", 0.3)
        with linked(address) as link:
            coordinator.joined().send(LEASE)
            assert link.lease() == LEASE
            assert failure(link.receive).code == "run.superseded"

    def test_a_runner_that_is_killed_is_lost_at_once(
        self, coordinator: Coordinator, address: Address
    ) -> None:
        with process("runner", address.location) as (runner, _):
            lane = coordinator.joined()
            lane.send(LEASE)
            assert isinstance(coordinator.next(Received).message, Report)
            killed_at = time.monotonic()
            runner.kill()
            assert coordinator.next(Lost).lane is lane
            assert time.monotonic() - killed_at < 3.0
        lane.send(Window(1, 10))  # nobody's loss
        lane.close()
        assert is_served(address, coordinator)

    def test_a_coordinator_that_is_killed_ends_its_runners_work(self) -> None:
        with (
            process("coordinator") as (driver, location),
            linked(Address(location, TOKEN)) as link,
        ):
            assert link.lease() == LEASE
            killed_at = time.monotonic()
            driver.kill()
            assert failure(link.receive).code == "run.disconnected"
            assert link.is_stopping
            assert failure(lambda: link.send(Report(0))).code == "run.disconnected"
            assert failure(link.confirm).code == "run.disconnected"
            assert time.monotonic() - killed_at < 10.0

    def test_where_nobody_serves_a_runner_says_so(self, coordinator: Coordinator) -> None:
        with serving(coordinator) as server:
            address = server.address("127.0.0.1", TOKEN)
        assert refusal(address).code == "run.disconnected"

    def test_a_runner_that_stands_still_neither_blocks_others_nor_the_end(
        self, coordinator: Coordinator, server: Server, address: Address
    ) -> None:
        """Its connection is full of windows that it does not read."""
        rows = pa.Table.from_pylist([{"aggregate_id": "a", "payload": b"x" * 4_000_000}], EVENTS)
        with process("runner", address.location) as (runner, _):
            lane = coordinator.joined()
            lane.send(LEASE)
            coordinator.next(Received)
            os.kill(runner.pid, signal.SIGSTOP)
            for number in range(20):
                lane.send(Window(number, number, rows=rows))
            assert is_served(address, coordinator)
            lane.close()
            assert is_served(address, coordinator)
            began = time.monotonic()
            server.end()
            assert time.monotonic() - began < 2.0

    def test_lanes_are_closed_under_runners_that_wait_again_and_again(
        self, coordinator: Coordinator, address: Address
    ) -> None:
        """gRPC aborted the whole process: the stream that was read had gone with its call."""
        for _ in range(30):
            with linked(address) as link:
                lane = coordinator.joined()
                lane.send(LEASE)
                link.lease()
                lane.close()
                assert failure(link.receive).code == "run.disconnected"
                assert coordinator.next(Lost).lane is lane


class TestRows:
    def test_many_windows_pass_while_reports_go_the_other_way(
        self, coordinator: Coordinator, address: Address
    ) -> None:
        rows = pa.Table.from_pylist(
            [{"aggregate_id": f"a{n}", "version": n, "payload": bytes(100)} for n in range(2_000)],
            EVENTS,
        )
        with linked(address) as link:
            lane = coordinator.joined()
            lane.send(LEASE)
            link.lease()
            for number in range(50):
                lane.send(Window(number, number, rows=rows))
            for number in range(50):
                window = link.receive()
                assert isinstance(window, Window)
                assert window.number == number
                assert window.rows is not None
                assert window.rows.equals(rows)
                link.send(Report(0, done=number))
            assert [_done(coordinator) for _ in range(50)] == list(range(50))

    def test_a_table_of_many_parts_or_of_a_slice_comes_whole(
        self, coordinator: Coordinator, address: Address
    ) -> None:
        part = pa.Table.from_pylist([{"aggregate_id": a, "version": 1} for a in "abc"], EVENTS)
        rows = pa.concat_tables([part, part.slice(1, 1)])
        with linked(address) as link:
            coordinator.joined().send(Window(1, 10, rows=rows))
            window = link.receive()
            assert isinstance(window, Window)
            assert window.rows is not None
            assert window.rows.column("aggregate_id").to_pylist() == ["a", "b", "c", "b"]


def _done(coordinator: Coordinator) -> int:
    message = coordinator.next(Received).message
    assert isinstance(message, Report)
    return message.done


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path, "ours")

    @staticmethod
    def tls(files: Files) -> Tls:
        return Tls(files.certificate.read_text(), files.key.read_text())

    def test_runners_and_questions_come_through_it(
        self, coordinator: Coordinator, authority: Authority
    ) -> None:
        tls = self.tls(authority.sign("driver", ["127.0.0.1"]))
        with serving(coordinator, tls=tls) as server:
            root = authority.files.certificate.read_text()
            address = server.address("127.0.0.1", TOKEN, root)
            assert address.location.startswith("grpc+tls://")
            assert is_served(address, coordinator)
            assert not is_in_force(address, 0, 1)

    def test_not_with_another_authority_nor_another_name_nor_in_the_clear(
        self, coordinator: Coordinator, authority: Authority, tmp_path: Path
    ) -> None:
        """And nobody is sent the token by who does not find the server to be the right one."""
        wrong = Authority(tmp_path / "others", "wrong").files.certificate.read_text()
        right = authority.files.certificate.read_text()
        with serving(coordinator, tls=self.tls(authority.sign("a", ["127.0.0.1"]))) as server:
            in_the_clear = Address(f"grpc://127.0.0.1:{server.port}", TOKEN)
            for address in (server.address("127.0.0.1", TOKEN, wrong), in_the_clear):
                assert failure(lambda: is_in_force(address, 0, 1)).retriable  # noqa: B023
                assert refusal(address).code == "run.disconnected"
        with serving(coordinator, tls=self.tls(authority.sign("b", ["other.example"]))) as server:
            address = server.address("127.0.0.1", TOKEN, right)
            assert failure(lambda: is_in_force(address, 0, 1)).retriable
        assert coordinator.nothing_happens()


def test_a_server_that_has_ended_lets_go_of_its_port(coordinator: Coordinator) -> None:
    with serving(coordinator) as server:
        port = server.port
        link = FlightLink(server.address("127.0.0.1", TOKEN), HELLO)
        coordinator.joined()
    assert failure(link.receive).code == "run.disconnected"
    link.close()
    with serving(coordinator, port=port) as again:
        assert again.port == port
        assert is_served(again.address("127.0.0.1", TOKEN), coordinator)


def test_no_thread_is_left_of_runners_that_have_gone(
    coordinator: Coordinator, address: Address
) -> None:
    for number in range(5):
        with linked(address, Hello(number, 7)) as link:
            coordinator.joined().send(LEASE)
            link.lease()
            link.send(Farewell())
            coordinator.next(Received)

    def left() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith(("eventpub-lane", "eventpub-link"))]

    assert until(lambda: not left()), left()
