"""Secrets are planted wherever the configuration takes one, and looked for wherever they may leak.

The installed publisher starts, meets a broker that is away, stops, and starts with a password that
was changed; every process below it is looked at all the while.
"""

from __future__ import annotations

import json
import shutil
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventpub.local.processes import free_port
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, insert
from tests.publisher.kafka_doors import PASSWORD, Doors, doors
from tests.publisher.test_kafka_security import password, through
from tests.security.planted import Planted, Processes, watched
from tests.servers.standalone import Standalone

STORE, WRONG = "planted-Store+pässword/1", "planted-wrong-2"
SECRETS = {
    "the store's password": STORE,
    "a wrong password": WRONG,
    "sasl.password": PASSWORD,
    "ssl.key.password": "planted-ssl-key-3",
    "sasl.oauthbearer.client.secret": "planted-oauth-4",
    "spark.ssl.keyPassword": "planted-spark-ssl-5",
    "spark.hadoop.fs.s3a.secret.key": "planted-s3a-6",
    "spark.hadoop.fs.azure.account.key.acc.dfs.core.windows.net": "planted-azure-7",
    "spark.driver.extraJavaOptions": "planted-java-option-8",
    "ops.token": "planted-ops-token-9",
}
PAGES = ["environment/", "jobs/", "stages/", "executors/", "api/v1/applications"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """Takes `PASSWORD` only, over TLS; may be stopped."""
    with doors(tmp_path_factory.mktemp("doors")) as made:
        yield made


@pytest.fixture
def temporary() -> Iterator[Path]:
    """In the place of /tmp, of a name that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ep-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def reader(database: FreshDatabase) -> Iterator[str]:
    """An account whose password is planted."""
    name = f"s{database.name[-10:]}"
    database.execute(f"CREATE USER {name}@'%%' IDENTIFIED BY %s", (STORE,))
    database.execute(f"GRANT SELECT ON {database.name}.* TO {name}@'%'")
    yield name
    database.execute(f"DROP USER {name}@'%'")


def plant(publisher: Publisher, broker: Doors, *, ui: int) -> None:
    """All but the store's."""
    kafka = password(broker, "PLAIN") | {
        name: SECRETS[name] for name in ("ssl.key.password", "sasl.oauthbearer.client.secret")
    }
    del kafka["sasl.password"]
    publisher.environment["EVENTPUB_SINK__PROPERTIES__SASL_PASSWORD"] = PASSWORD
    publisher.settings["ops"] = {
        "http": f"127.0.0.1:{free_port()}",
        "token": SECRETS["ops.token"],
    }
    through(publisher, broker.plain, properties=kafka)
    publisher.topic.bootstrap_servers = broker.open
    spark = {name: SECRETS[name] for name in SECRETS if name.startswith("spark.")}
    spark["spark.driver.extraJavaOptions"] = f"-Dplanted.password={SECRETS[_OPTIONS]}"
    spark |= {"spark.ui.enabled": "true", "spark.ui.port": str(ui)}
    properties = publisher.settings["spark"].setdefault("properties", {})
    publisher.settings["spark"]["properties"] = properties | spark


_OPTIONS = "spark.driver.extraJavaOptions"

STORE_PASSWORD = ["in the URL", "in the environment", "in a file"]


def with_store_password(publisher: Publisher, url: str, where: str) -> None:
    """The store's password, by one of the three ways."""
    store = publisher.settings["store"]
    if where == "in the URL":
        store["url"] = url
        return
    scheme, rest = url.split("://", 1)
    account, host = rest.rsplit("@", 1)
    store["url"] = f"{scheme}://{account.split(':')[0]}@{host}"
    if where == "in a file":
        file = publisher.folder / "store-password"
        file.write_text(STORE)
        store["password_file"] = str(file)
    else:
        publisher.environment["EVENTPUB_STORE__PASSWORD"] = STORE


def pages(port: int) -> dict[str, bytes]:
    """Spark's pages, and its answers to programs."""
    base = f"http://127.0.0.1:{port}"

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"{base}/{path}", timeout=20) as answer:
            return bytes(answer.read())

    found = {path: get(path) for path in PAGES}
    [application] = json.loads(found["api/v1/applications"])
    path = f"api/v1/applications/{application['id']}/environment"
    return found | {path: get(path)}


def search_own_pages(planted: Planted, publisher: Publisher) -> None:
    """What the publisher itself answers over HTTP."""
    base = f"http://{publisher.settings['ops']['http']}"
    for path in ("/status", "/metrics", "/config", "/gaps", "/history", "/readyz", "/"):
        try:
            with urllib.request.urlopen(base + path, timeout=30) as answer:
                planted.search(path, answer.read())
        except urllib.error.HTTPError as error:  # not ready, say
            planted.search(path, error.read())


def search_commands(planted: Planted, publisher: Publisher) -> dict[str, int]:
    """Exit status by command."""
    statuses = {}
    for command in (
        ["config", "show"],
        ["config", "show", "--json"],
        ["config", "check", "--json"],
        ["doctor"],
        ["doctor", "--json"],
        ["gaps", "list", "--json"],
        ["status"],
        ["verify", "--json"],
    ):
        done = publisher.command(*command)
        statuses[" ".join(command)] = done.returncode
        planted.search(" ".join(command), done.stdout + done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
    return statuses


def search_state(planted: Planted, publisher: Publisher) -> None:
    """All its files, and that only its user reaches the socket."""
    socket = publisher.state / "publisher.sock"
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    planted.search_folder(publisher.state)


def search_processes(planted: Planted, processes: Processes, driver: int) -> None:
    """Arguments of all; the environment of all but the driver, whose configuration is in it."""
    for found in processes.arguments.values():
        for arguments in found:
            planted.search(f"arguments: {arguments.split(chr(0))[:1]}", arguments)
    others = {pid: found for pid, found in processes.environments.items() if pid != driver}
    own = processes.environments[driver]
    for pid, environments in others.items():
        # between fork and exec a child still has its parent's
        for environment in environments - own:
            planted.search(f"environment: {processes.arguments[pid]}", environment)


def publish(publisher: Publisher, database: FreshDatabase, versions: list[int]) -> None:
    """The next version of an aggregate, seen on the topic."""
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, "a", versions[-1])
    publisher.until_published("a", versions)


def live(
    publisher: Publisher,
    database: FreshDatabase,
    broker: Doors,
    reader: str,
    planted: Planted,
    folders: list[Path],
    *,
    ui: int,
) -> None:
    """Start, a broker that is away, a stop, a changed password; looks in all places."""
    publish(publisher, database, [1])
    try:
        publisher.until_spark_publishes()
    except AssertionError as error:
        spark_log = (publisher.state / "spark.log").read_text(errors="replace")
        raise AssertionError(f"{error}\n{publisher.words()}\n{spark_log[-2000:]}") from None
    publish(publisher, database, [1, 2])
    for path, page in pages(ui).items():
        planted.search(f"Spark's page {path}", page)
    statuses = search_commands(planted, publisher)
    statuses.pop("status")  # not every check may have been made yet
    assert set(statuses.values()) == {0}, statuses
    search_own_pages(planted, publisher)
    search_state(planted, publisher)

    publisher.topic.close()  # who follows it would fill the log
    broker.server.stop()
    try:
        with database.connect() as connection, connection.cursor() as cursor:
            insert(cursor, "a", 3)
        publisher.until_said("sink.")
    finally:
        broker.server.start()
    publisher.until_published("a", [1, 2, 3])
    assert publisher.stop() == 143

    database.execute(f"ALTER USER {reader}@'%%' IDENTIFIED BY %s", ("another",))
    publisher.start()
    assert publisher.finish() == 3
    assert "store.auth_failed" in publisher.words()
    for command in (["doctor", "--json"], ["verify", "--json"]):
        done = publisher.command(*command)
        assert "store.auth_failed" in done.stdout
        planted.search(f"{command} with a wrong password", done.stdout + done.stderr)

    for folder in folders:
        planted.search_folder(folder)
    for which in (publisher.state, publisher.folder / "publisher.log"):
        assert which.exists()
    planted.search_folder(publisher.state)
    planted.search("what it printed", publisher.log.read_bytes())


def search_wrong_passwords(planted: Planted, publisher: Publisher) -> None:
    """What is said of them, which are right secrets elsewhere."""
    for variable in ("EVENTPUB_SINK__PROPERTIES__SASL_PASSWORD", "EVENTPUB_STORE__PASSWORD"):
        before = dict(publisher.environment)
        publisher.environment[variable] = WRONG
        for command in ("run", "doctor"):
            done = publisher.command(command, "--json")
            assert done.returncode, variable
            planted.search(f"{command} with a wrong {variable}", done.stdout + done.stderr)
            assert "auth_failed" in done.stdout or "contradiction" in done.stdout, done.stdout
        publisher.environment = before


@pytest.mark.parametrize("where", STORE_PASSWORD)
def test_no_command_shows_a_secret_wherever_it_is_configured(
    publisher: Publisher, database: FreshDatabase, broker: Doors, reader: str, where: str
) -> None:
    plant(publisher, broker, ui=0)
    with_store_password(publisher, database.url_of(reader, STORE), where)
    planted = Planted(SECRETS)
    publisher.publish_everything()
    statuses = search_commands(planted, publisher)
    statuses.pop("status")
    assert set(statuses.values()) == {0}, statuses
    if where == STORE_PASSWORD[0]:
        search_wrong_passwords(planted, publisher)
    planted.search("what it printed", publisher.log.read_bytes())
    planted.search_folder(publisher.state)
    assert planted.found == {}


def test_no_secret_leaves_a_publisher_with_spark_on_this_machine(
    publisher: Publisher,
    database: FreshDatabase,
    broker: Doors,
    reader: str,
    temporary: Path,
) -> None:
    ui = free_port()
    publisher.settings["spark"] = {"master": "local[*]"}
    plant(publisher, broker, ui=ui)
    with_store_password(publisher, database.url_of(reader, STORE), "in the environment")
    planted = Planted(SECRETS)
    publisher.start(environment={"TMPDIR": str(temporary)})
    assert publisher.process is not None
    driver = publisher.process.pid
    with watched([driver]) as processes:
        live(publisher, database, broker, reader, planted, [temporary], ui=ui)
    assert processes.seen("org.apache.spark.deploy.SparkSubmit")
    assert processes.seen("pyspark.daemon")
    search_processes(planted, processes, driver)
    assert planted.found == {}


def test_no_secret_leaves_a_publisher_with_a_cluster(
    publisher: Publisher,
    database: FreshDatabase,
    broker: Doors,
    reader: str,
    temporary: Path,
    tmp_path: Path,
) -> None:
    ui = free_port()
    folder = tmp_path / "cluster"
    folder.mkdir()
    planted = Planted(SECRETS)
    with Standalone(folder, cores=2) as cluster:
        properties: dict[str, Any] = {
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
        spark = {"master": cluster.url, "properties": properties}
        publisher.settings["spark"] = spark
        plant(publisher, broker, ui=ui)
        with_store_password(publisher, database.url_of(reader, STORE), "in the environment")
        publisher.start(environment={"TMPDIR": str(temporary)})
        assert publisher.process is not None
        driver = publisher.process.pid
        roots = [driver, *(worker.pid for worker in cluster.workers)]
        with watched(roots) as processes:
            live(publisher, database, broker, reader, planted, [temporary, folder], ui=ui)
    assert processes.seen("org.apache.spark.deploy.SparkSubmit")
    assert processes.seen("CoarseGrainedExecutorBackend")
    assert processes.seen("pyspark.daemon")
    search_processes(planted, processes, driver)
    assert planted.found == {}


def test_what_is_planted_is_found_where_it_is(tmp_path: Path) -> None:
    """The search itself."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"\0 planted-1 \xff")
    planted = Planted({"one": "planted-1", "two": "pä/ss", "none": "absent"})
    planted.search_folder(tmp_path)
    planted.search("a URL", "mysql://x:p%C3%A4%2Fss@host")
    assert planted.found == {"one": {"deep/file"}, "two": {"a URL"}}
