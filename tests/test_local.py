"""The servers of eventpub.local: real ones, started, stopped, killed and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eventpub.errors import LocalError
from eventpub.local import downloads as cache
from eventpub.local.downloads import find_java
from eventpub.local.servers import Database, Kafka
from tests.conftest import FreshDatabase
from tests.servers import kafka_cluster
from tests.servers.databases import mariadb, mysql
from tests.servers.kafka import kafka
from tests.servers.signals import pause, restart, resume

BOTH = pytest.mark.parametrize("start", [mysql, mariadb])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone(pid: int, within: float = 15) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def rows(server: Database, statement: str) -> tuple[tuple[object, ...], ...]:
    with server.connect(autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return tuple(cursor.fetchall())


class TestDatabases:
    @BOTH
    def test_keeps_its_data_over_stop_kill_and_restart(
        self, start: Callable[..., Database], tmp_path: Path
    ) -> None:
        with start(tmp_path) as server:
            rows(server, "CREATE TABLE t (n INT)")
            rows(server, "INSERT INTO t VALUES (1)")
            port, first = server.port, server.pid
            server.kill()
            assert gone(first)
            assert not server.running
            server.start()
            rows(server, "INSERT INTO t VALUES (2)")
            restart(server)
            assert (server.port, server.pid != first) == (port, True)
            assert rows(server, "SELECT COUNT(*) FROM t") == ((2,),)
            last = server.pid
        assert gone(last)
        assert not answers(port)

    @pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
    def test_takes_many_connections(self, database: FreshDatabase) -> None:
        assert database.execute("SELECT @@max_connections >= 500") == ((1,),)

    @pytest.mark.parametrize(
        ("start", "zone", "named", "hours"),
        [(mysql, "Asia/Tokyo", "SYSTEM", 9), (mariadb, "+05:30", "+05:30", 5.5)],
    )
    def test_runs_in_another_time_zone_and_with_the_callers_options(
        self,
        start: Callable[..., Database],
        zone: str,
        named: str,
        hours: float,
        tmp_path: Path,
    ) -> None:
        options = ["--innodb-flush-log-at-trx-commit=2"]
        with start(tmp_path, time_zone=zone, options=options) as server:
            assert rows(
                server,
                "SELECT @@global.time_zone, @@innodb_flush_log_at_trx_commit, "
                "TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP(), CURRENT_TIMESTAMP())",
            ) == ((named, 2, hours * 60),)

    def test_paused_it_answers_nothing_and_resumed_it_does(self, tmp_path: Path) -> None:
        import pymysql

        with mariadb(tmp_path) as server:
            pause(server)
            with pytest.raises(pymysql.err.Error):
                server.connect(read_timeout=1, connect_timeout=1)
            resume(server)
            server.connect().close()

    def test_says_the_last_lines_of_its_log_when_it_does_not_start(self, tmp_path: Path) -> None:
        with pytest.raises(LocalError, match="no-such-option") as raised:
            mariadb(tmp_path, options=["--no-such-option"])
        assert raised.value.code == "local.start_failed"
        assert raised.value.where == str(tmp_path / "server.log")

    def test_a_taken_port_is_said(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(LocalError) as raised:
                mariadb(tmp_path, port=taken.getsockname()[1])
        assert "another process listens" in (raised.value.suggestion or "")

    def test_urls_name_user_password_and_database(self, mariadb_server: Database) -> None:
        assert mariadb_server.url("bob", password="p@ss", database="shop") == (
            f"mysql+pymysql://bob:p%40ss@127.0.0.1:{mariadb_server.port}/shop"
        )


class TestKafka:
    def test_serves_transactions_and_keeps_its_topics_over_a_kill(self, tmp_path: Path) -> None:
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        properties = {"broker.session.timeout.ms": "2000"}
        with kafka(tmp_path, properties=properties) as broker:
            admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
            admin.create_topics([NewTopic("orders", 8)])["orders"].result()
            producer = Producer(
                {
                    "bootstrap.servers": broker.bootstrap_servers,
                    "transactional.id": "t",
                    "log_level": 0,
                }
            )
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce("orders", b"payload")
            producer.commit_transaction()
            del producer
            killed = broker.pid
            broker.kill()
            assert gone(killed)
            broker.start()
            topics = admin.list_topics(timeout=10).topics
            assert len(topics["orders"].partitions) == 8
            last = broker.pid
        assert gone(last)

    def test_does_not_make_a_topic_because_it_was_named(
        self, kafka_server: Kafka, topic_name: str
    ) -> None:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient(
            {"bootstrap.servers": kafka_server.bootstrap_servers, "allow.auto.create.topics": True}
        )
        assert admin.list_topics(topic_name, timeout=10).topics[topic_name].error is not None
        assert topic_name not in admin.list_topics(timeout=10).topics


class TestKafkaCluster:
    @pytest.mark.long
    def test_three_brokers_keep_three_copies_and_stop_together(self, tmp_path: Path) -> None:
        from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
        from confluent_kafka.cimpl import NewTopic

        with kafka_cluster(tmp_path, brokers=3) as cluster:
            pids = [broker.pid for broker in cluster.brokers.values()]
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
            admin.create_topics([NewTopic("orders", 4)])["orders"].result(30)
            found = admin.list_topics(timeout=30)
            deadline = time.monotonic() + 60  # until each broker knows of it
            while time.monotonic() < deadline and (
                "orders" not in found.topics or len(found.brokers) < 3
            ):
                found = admin.list_topics(timeout=30)
            assert len(found.brokers) == 3
            assert all(len(p.replicas) == 3 for p in found.topics["orders"].partitions.values())
            topic = ConfigResource(ConfigResource.Type.TOPIC, "orders")
            settings = admin.describe_configs([topic])[topic].result(60)
            assert settings["min.insync.replicas"].value == "2"
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)


class TestNothingIsLeftBehind:
    STARTER = """
import sys, threading, time
from pathlib import Path
from eventpub.local.servers import {what}
started = []
thread = threading.Thread(
    target=lambda: started.append({what}(Path(sys.argv[1])))
)
thread.start(); thread.join()
time.sleep(0.3)
print(started[0].pid if started[0].running else "gone", flush=True)
{then}
"""

    def start(self, tmp_path: Path, then: str, what: str = "mariadb") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.STARTER.format(what=what, then=then), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def pid_of_server(self, starter: subprocess.Popen[str]) -> int:
        assert starter.stdout is not None
        return int(starter.stdout.readline())

    def test_by_a_process_that_is_killed(self, tmp_path: Path) -> None:
        with self.start(tmp_path, "time.sleep(60)") as starter:
            server = self.pid_of_server(starter)
            starter.kill()
        assert gone(server)

    def test_by_a_process_that_ends_without_stopping_it(self, tmp_path: Path) -> None:
        with self.start(tmp_path, "") as starter:
            server = self.pid_of_server(starter)
        assert gone(server)

    def test_paused_or_not(self, tmp_path: Path) -> None:
        stops = "import os, signal; os.kill(started[0].pid, signal.SIGSTOP); time.sleep(60)"
        with self.start(tmp_path, stops) as starter:
            server = self.pid_of_server(starter)
            time.sleep(0.2)
            starter.kill()
        assert gone(server)

    def test_and_ctrl_c_on_the_terminal_does_not_reach_it(self, tmp_path: Path) -> None:
        then = (
            "try: print('ready', flush=True); time.sleep(60)\n"
            "except KeyboardInterrupt: print(started[0].running)"
        )
        with self.start(tmp_path, then) as starter:
            server = self.pid_of_server(starter)
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
            os.killpg(starter.pid, signal.SIGINT)
            assert starter.stdout.readline() == "True\n"
        assert gone(server)

    def test_by_the_command(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "eventpub.local.servers", "mariadb", str(tmp_path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            url = running.stdout.readline()
            assert url.startswith("mysql+pymysql://root@127.0.0.1:")
            children = psutil.Process(running.pid).children(recursive=True)
            assert children
            running.send_signal(signal.SIGTERM)
        assert running.returncode == 0
        assert all(gone(child.pid) for child in children)


class TestJava:
    @pytest.fixture(autouse=True)
    def _search_again(self) -> object:
        find_java.cache_clear()
        yield
        find_java.cache_clear()

    def fake_java(self, home: Path, says: str) -> Path:
        java_file = home / "bin" / "java"
        java_file.parent.mkdir(parents=True)
        java_file.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        java_file.chmod(java_file.stat().st_mode | stat.S_IXUSR)
        return java_file

    def test_none_is_an_error_that_says_how_to_get_one(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(cache, "_candidates", lambda: iter([]))
        with pytest.raises(LocalError) as raised:
            kafka(tmp_path)
        assert raised.value.code == "local.java_missing"
        assert "17" in (raised.value.suggestion or "")

    def test_one_that_is_too_old_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        old = self.fake_java(tmp_path, 'openjdk version "1.8.0_392"')
        monkeypatch.setattr(cache, "_candidates", lambda: iter([old]))
        with pytest.raises(LocalError, match="Java 8"):
            find_java()

    def test_of_java_home_comes_first(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        newer = self.fake_java(tmp_path, 'openjdk version "21.0.2" 2024-01-16')
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        assert find_java() == newer


class TestCache:
    @pytest.fixture(autouse=True)
    def _own_cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("EVENTPUB_CACHE", str(tmp_path / "cache"))

    def test_builds_once(self, tmp_path: Path) -> None:
        built: list[Path] = []
        for _ in range(2):
            folder = cache.installed("thing", needs=1, build=built.append)
        assert (len(built), folder) == (1, tmp_path / "cache" / "thing")

    def test_leaves_nothing_half_built(self, tmp_path: Path) -> None:
        def fail(folder: Path) -> None:
            (folder / "half").write_text("")
            raise LocalError("local.network", "away")

        with pytest.raises(LocalError):
            cache.installed("thing", needs=1, build=fail)
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["thing.lock"]

    def test_two_processes_build_once(self, tmp_path: Path) -> None:
        code = (
            "import sys, time\n"
            "from eventpub.local.downloads import installed\n"
            "def build(folder):\n"
            "    print('built', flush=True)\n"
            "    time.sleep(0.3)\n"
            "installed('thing', needs=1, build=build)\n"
        )
        both = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert sorted(process.communicate()[0] for process in both) == ["", "built\n"]
        assert [process.returncode for process in both] == [0, 0]

    def test_says_when_the_disk_is_full(self) -> None:
        with pytest.raises(LocalError) as raised:
            cache.installed("thing", needs=1 << 60, build=lambda _: None)
        assert raised.value.code == "local.disk_full"

    def test_says_when_nothing_can_be_downloaded(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        with pytest.raises(LocalError) as raised:
            kafka(tmp_path / "kafka")
        assert raised.value.code == "local.network"
        assert "proxy" in (raised.value.suggestion or "")

    def test_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("EVENTPUB_CACHE", str(tmp_path / "file"))
        with pytest.raises(LocalError) as raised:
            cache.installed("thing", needs=1, build=lambda _: None)
        assert raised.value.code == "local.cache_denied"


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_the_tests_own_databases_are_fresh(database: FreshDatabase) -> None:
    assert database.execute("SHOW TABLES") == ()
    assert database.execute("SELECT DATABASE()") == ((database.name,),)
