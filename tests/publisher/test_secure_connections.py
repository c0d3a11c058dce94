"""TLS to the database and ways to log in: what is wrong is named by `doctor` and `run`."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eventpub.config import Store
from eventpub.errors import LocalError, StoreError
from eventpub.local.servers import Database
from eventpub.sources.mysql.connection import connect, mapped, run
from tests.certificates import Authority, Files
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, create_table, insert
from tests.publisher.test_set_up import ask, assert_both_say
from tests.servers.databases import mariadb, mysql
from tests.tcp_proxy import TcpProxy

WORD = "hunter2-hunter2"
HOSTS = ["localhost", "127.0.0.1"]


@dataclass(frozen=True)
class Secured:
    """A server whose certificates can be exchanged, and its authority."""

    server: Database
    authority: Authority
    files: Files

    @property
    def database(self) -> FreshDatabase:
        return FreshDatabase(self.server, "eventpub")

    @property
    def is_mysql(self) -> bool:
        return "MySQL" in self.server.name

    def url(self, user: str = "reader", *, host: str = "127.0.0.1", **options: object) -> str:
        """The URL of the event table's database, with options of TLS."""
        ends = "&".join(f"{key}={value}" for key, value in options.items())
        return f"mysql+pymysql://{user}:{WORD}@{host}:{self.server.port}/eventpub?{ends}"

    @contextmanager
    def using(self, files: Files) -> Iterator[None]:
        """The server shows another certificate."""
        own = {path: path.read_bytes() for path in (self.files.certificate, self.files.key)}
        try:
            shutil.copy(files.certificate, self.files.certificate)
            shutil.copy(files.key, self.files.key)
            self._reload()
            yield
        finally:
            for path, text in own.items():
                path.write_bytes(text)
            self._reload()

    def _reload(self) -> None:
        self.database.execute("ALTER INSTANCE RELOAD TLS" if self.is_mysql else "FLUSH SSL")


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp(f"tls-{request.param}")
    authority = Authority(folder, "authority")
    files = authority.sign("server", HOSTS)
    start: Callable[..., Database] = mysql if request.param == "mysql" else mariadb
    options = [
        f"--ssl-ca={authority.files.certificate}",
        f"--ssl-cert={files.certificate}",
        f"--ssl-key={files.key}",
        "--skip-log-bin",
        *(["--ssl=ON"] if request.param == "mariadb" else []),
    ]
    with start(folder / "server", options=options) as server:
        found = Secured(server, authority, files)
        database = found.database
        kind = "utf8mb4_0900_bin" if found.is_mysql else "utf8mb4_nopad_bin"
        create_table(database, collation=kind)
        for user, more in (("reader", ""), ("certified", " REQUIRE X509")):
            database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY '{WORD}'{more}")
            database.execute(f"GRANT SELECT ON eventpub.events TO {user}@'%'")
        yield found


@pytest.fixture
def tls_publisher(secured: Secured, new_publisher: NewPublisher) -> Publisher:
    return new_publisher(secured.database)


def cipher(url: str) -> str:
    """What a connection is encrypted with; empty: it is not."""
    with closing(connect(Store.model_validate({"url": url}))) as connection:
        return str(run(connection, "SHOW SESSION STATUS LIKE 'Ssl_cipher'")[0][1])


def test_a_certificate_of_the_right_authority_for_the_right_host(
    secured: Secured, tls_publisher: Publisher
) -> None:
    url = secured.url(ssl_ca=secured.authority.files.certificate, ssl_verify_identity="true")
    assert cipher(url)
    assert cipher(url.replace("127.0.0.1", "localhost"))
    tls_publisher.settings["store"]["url"] = url
    done = tls_publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout
    tls_publisher.start()
    name = f"tls-{tls_publisher.topic.name}"
    with secured.database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, name, 1)
    tls_publisher.until_published(name, [1])


def test_a_client_certificate(secured: Secured, tls_publisher: Publisher, tmp_path: Path) -> None:
    """Without it the server says no more than that the login is wrong."""
    ca = secured.authority.files.certificate
    own = secured.authority.sign("client")
    assert cipher(secured.url("certified", ssl_ca=ca, ssl_cert=own.certificate, ssl_key=own.key))
    tls_publisher.settings["store"]["url"] = secured.url("certified", ssl_ca=ca)
    said = ask(tls_publisher, doctor_status=3)
    assert_both_say(said, "store.auth_failed", "ssl_cert", "ssl_key")
    other = Authority(tmp_path, "other").sign("client")
    tls_publisher.settings["store"]["url"] = secured.url(
        "certified", ssl_ca=ca, ssl_cert=other.certificate, ssl_key=other.key
    )
    said = ask(tls_publisher, doctor_status=3)
    # whether the server says so or only ends the connection depends on its library
    assert said.run["code"] in {"store.tls_failed", "store.auth_failed", "store.connection_lost"}
    assert "ssl_cert" in said.run["suggestion"]


def _wrong_authority(secured: Secured, folder: Path) -> tuple[Files | None, dict[str, Any]]:
    return None, {"ssl_ca": Authority(folder, "other").files.certificate}


def _wrong_host(secured: Secured, folder: Path) -> tuple[Files | None, dict[str, Any]]:
    options = {"ssl_ca": secured.authority.files.certificate, "ssl_verify_identity": "true"}
    return secured.authority.sign("elsewhere", ["db.example"]), options


def _expired(secured: Secured, folder: Path) -> tuple[Files | None, dict[str, Any]]:
    """The servers take none that has expired already."""
    files = secured.authority.sign("expired", HOSTS, seconds=6)
    return files, {"ssl_ca": secured.authority.files.certificate}


def _file_missing(secured: Secured, folder: Path) -> tuple[Files | None, dict[str, Any]]:
    return None, {"ssl_ca": folder / "none.pem"}


WRONG: dict[str, tuple[Callable[[Secured, Path], tuple[Files | None, dict[str, Any]]], list[str]]]
WRONG = {
    "another authority": (_wrong_authority, ["ssl_ca", "authority"]),
    "another host": (_wrong_host, ["127.0.0.1", "host name"]),
    "an expired certificate": (_expired, ["expired", "renew"]),
    "a file that is not there": (_file_missing, ["none.pem", "ssl_ca"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_certificate_is_said(
    secured: Secured, tls_publisher: Publisher, tmp_path: Path, wrong: str
) -> None:
    make, words = WRONG[wrong]
    files, options = make(secured, tmp_path)
    tls_publisher.settings["store"]["url"] = secured.url(**options)
    with secured.using(files) if files else nullcontext():
        if "expired" in words:
            time.sleep(6.5)
        said = ask(tls_publisher, doctor_status=3)
    assert_both_say(said, "store.tls_failed", *words)
    assert not said.run["retriable"]


def test_a_server_that_wants_tls_and_a_url_that_forbids_it(
    secured: Secured, tls_publisher: Publisher
) -> None:
    secured.database.execute("SET GLOBAL require_secure_transport = ON")
    try:
        assert cipher(secured.url())  # on this machine TLS is used only where it must be
        tls_publisher.settings["store"]["url"] = secured.url(ssl_disabled="true")
        said = ask(tls_publisher, doctor_status=3)
    finally:
        with secured.server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL require_secure_transport = OFF")
    assert_both_say(said, "store.tls_failed", "ssl_disabled")


def test_a_url_that_wants_tls_and_a_server_that_has_none(
    mariadb_server: Database, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    publisher = new_publisher(FreshDatabase(mariadb_server, "eventpub"))
    ca = Authority(tmp_path, "authority").files.certificate
    publisher.settings["store"]["url"] += f"?ssl_ca={ca}"
    assert_both_say(ask(publisher, doctor_status=3), "store.tls_failed", "server", "ssl_ca")


def test_the_hosts_name_is_checked_against_the_systems_authorities_too(
    secured: Secured, tls_publisher: Publisher
) -> None:
    """`ssl_verify_identity` without `ssl_ca`: as for a certificate that everybody trusts."""
    tls_publisher.environment["SSL_CERT_FILE"] = str(secured.authority.files.certificate)
    tls_publisher.settings["store"]["url"] = secured.url(ssl_verify_identity="true")
    assert tls_publisher.command("doctor", "--json").returncode == 0
    with secured.using(secured.authority.sign("elsewhere", ["db.example"])):
        said = ask(tls_publisher, doctor_status=3)
    assert_both_say(said, "store.tls_failed", "host name")


def test_a_secure_connection_that_is_cut_is_only_a_lost_connection(secured: Secured) -> None:
    """As at each restart of the server: nothing is wrong with the certificates."""
    ca = secured.authority.files.certificate
    with TcpProxy(secured.server.port) as proxy:
        url = secured.url(ssl_ca=ca).replace(str(secured.server.port), str(proxy.port))
        config = Store.model_validate({"url": url, "connect_timeout": "2s"})
        connection = connect(config)
        proxy.cut()
        with pytest.raises(StoreError) as caught, mapped():
            run(connection, "SELECT 1")
        assert (caught.value.code, caught.value.retriable) == ("store.connection_lost", True)
        proxy.cuts_after = 1  # of the bytes that the client sends: in the middle of the handshake
        with pytest.raises(StoreError) as caught:
            connect(config)
        assert (caught.value.code, caught.value.retriable) == ("store.unreachable", True)


LOGINS = {
    "caching_sha2_password": ("mysql", "IDENTIFIED WITH caching_sha2_password BY '{word}'"),
    "sha256_password": ("mysql", "IDENTIFIED WITH sha256_password BY '{word}'"),
    "mysql_native_password": (
        "mariadb",
        "IDENTIFIED VIA mysql_native_password USING PASSWORD('{word}')",
    ),
}


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("plugin", LOGINS)
def test_ways_to_log_in_that_work(secured: Secured, plugin: str, encrypted: bool) -> None:
    kind, how = LOGINS[plugin]
    if (kind == "mysql") != secured.is_mysql:
        pytest.skip(f"a plugin of {kind}")
    with account(secured, how.format(word=WORD)) as user:
        switch = "ssl_verify_cert=false" if encrypted else "ssl_disabled=true"
        with closing(connect(Store.model_validate({"url": f"{secured.url(user)}{switch}"}))) as c:
            assert run(c, "SELECT 1") == [(1,)]


@contextmanager
def account(secured: Secured, how: str, name: str | None = None) -> Iterator[str]:
    user = name or f"u{os.urandom(4).hex()}"
    secured.database.execute(f"CREATE USER {user}@'%' {how}")
    try:
        secured.database.execute(f"GRANT SELECT ON eventpub.events TO {user}@'%'")
        yield user
    finally:
        secured.database.execute(f"DROP USER {user}@'%'")


def test_ed25519_works_with_its_library_and_says_so_without(
    tmp_path: Path, new_publisher: NewPublisher
) -> None:
    with _mariadb_of_packages(tmp_path, ["--plugin-load-add=auth_ed25519"]) as server:
        database = FreshDatabase(server, "eventpub")
        create_table(database, collation="utf8mb4_nopad_bin")
        database.execute(f"CREATE USER ed IDENTIFIED VIA ed25519 USING PASSWORD('{WORD}')")
        database.execute("GRANT SELECT ON eventpub.events TO ed")
        publisher = new_publisher(database, store={"url": database.url_of("ed", WORD)})
        if importlib.util.find_spec("nacl") is not None:
            assert publisher.command("doctor", "--json").returncode == 0
            return
        assert_both_say(ask(publisher, doctor_status=3), "store.auth_unsupported", "pynacl")


def test_a_way_to_log_in_that_the_client_does_not_have_is_named(
    tmp_path: Path, new_publisher: NewPublisher
) -> None:
    """MariaDB's new default for those who ask for it: PARSEC."""
    with _mariadb_of_packages(tmp_path, ["--plugin-load-add=auth_parsec"]) as server:
        database = FreshDatabase(server, "eventpub")
        database.execute(f"CREATE USER new IDENTIFIED VIA parsec USING PASSWORD('{WORD}')")
        publisher = new_publisher(database, store={"url": database.url_of("new", WORD)})
        said = ask(publisher, doctor_status=3)
        assert_both_say(said, "store.auth_unsupported", "parsec", "ALTER USER")


def test_the_operating_systems_account_by_the_servers_socket(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="ep-"))  # a socket's path has at most 107 characters
    try:
        with mariadb(folder) as server:
            database = FreshDatabase(server, "eventpub")
            how = "IDENTIFIED VIA unix_socket"
            database.execute(f"CREATE OR REPLACE USER '{user}'@localhost {how}")
            database.execute(f"GRANT SELECT ON eventpub.* TO '{user}'@localhost")
            socket = folder / "data" / "server.sock"
            here = f"mysql+pymysql://{user}@localhost/eventpub?unix_socket={socket}"
            with closing(connect(Store.model_validate({"url": here}))) as connection:
                assert run(connection, "SELECT 1") == [(1,)]
            gone = here.replace("server.sock", "none.sock")
            with pytest.raises(StoreError) as caught:
                connect(Store.model_validate({"url": gone}))
            assert caught.value.code == "store.unreachable"
    finally:
        shutil.rmtree(folder)


@contextmanager
def _mariadb_of_packages(folder: Path, options: list[str]) -> Iterator[Database]:
    """One that comes with its plugins."""
    try:
        server = mariadb(folder / "mariadb", version="11.8", options=options)
    except LocalError as error:
        if error.code == "local.unsupported_platform":
            pytest.skip(str(error))
        raise
    with server:
        yield server
