"""What doctor says of the event store."""

from __future__ import annotations

import time

import pytest

from eventpub.config import Store
from eventpub.errors import Check
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql.checking import checks
from eventpub.sources.mysql.migrating import migrate
from tests.conftest import FreshDatabase
from tests.publisher.harness import eventually
from tests.store.tables import create, insert

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)


def found(config: Store) -> dict[str, Check]:
    return {check.name.removeprefix("event store: "): check for check in checks(config)}


@both
def test_a_migrated_table_is_as_it_should_be(database: FreshDatabase) -> None:
    config = Store(url=database.url)
    migrate(config)
    assert {name: check.status for name, check in found(config).items()} == dict.fromkeys(
        [
            "connection",
            "server",
            "table",
            "slice column",
            "identity of aggregates",
            "rows without identity or time",
            "versions",
            "first versions",
            "create_time",
            "open transactions",
            "clock",
            "time zone",
        ],
        "ok",
    )


@both
def test_the_documented_table_works_and_is_told_what_would_be_faster(
    database: FreshDatabase,
) -> None:
    said = found(create(database))
    assert all(check.status == "ok" for check in said.values())
    assert "ADD COLUMN `slice`" in str(said["slice column"].suggestion)


@both
def test_a9_aggregates_that_begin_above_the_first_version_are_said(
    database: FreshDatabase,
) -> None:
    config = create(database)
    now = "2026-03-01 12:00:00"
    insert(database, [(f"whole {n}", 1, now) for n in range(10)])
    insert(database, [(f"archived {n}", v, now) for n in range(20) for v in (5, 6)])
    said = found(config)["first versions"]
    assert said.status == "warn"
    assert "20 of 30 aggregates begin above version 1" in said.message
    assert "set read.start" in str(said.suggestion)
    assert found(config.model_copy(update={"first_version": 0}))["first versions"].status == "warn"
    # it said that all begin with 1 where half do
    insert(database, [(f"whole {n}", 1, now) for n in range(10, 30)])
    said = found(config)["first versions"]
    assert said.status == "warn"
    assert "20 of 50 aggregates begin above version 1: each waits" in said.message
    insert(database, [(f"whole {n}", 1, now) for n in range(30, 400)])
    said = found(config)["first versions"]
    assert (said.status, said.message) == ("ok", "20 of 420 aggregates begin above version 1")


@both
def test_some_that_begin_with_0_are_not_told_to_begin_with_1(database: FreshDatabase) -> None:
    """Their first events would become dead letters."""
    config = create(database).model_copy(update={"first_version": 0})
    now = "2026-03-01 12:00:00"
    insert(database, [(f"a{n}", n % 2, now) for n in range(20)])
    said = found(config)["first versions"]
    assert said.status == "warn"
    assert "10 of 20 aggregates begin above version 0" in said.message
    assert "first_version" not in str(said.suggestion)


@both
def test_what_is_not_well_is_a_warning_with_its_remedy(database: FreshDatabase) -> None:
    config = create(
        database,
        aggregate_id="VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NULL",
        create_time="DATETIME(3) NOT NULL",
    )
    insert(database, [("a", 1, "2099-01-01")])
    said = found(config)
    warned = {name for name, check in said.items() if check.status == "warn"}
    assert warned == {
        "identity of aggregates",
        "rows without identity or time",
        "create_time",
        "time zone",
    }
    assert all(said[name].suggestion for name in warned)
    assert "utf8mb4_general_ci" in said["identity of aggregates"].message
    assert "in the future, 2099-01-01T00:00:00.000000Z: it is" in said["time zone"].message


@both
def test_writers_who_give_a_timestamp_of_another_zone_are_seen(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes what they write for times of their sessions."""
    config = create(database, create_time="TIMESTAMP(6) NOT NULL")
    ids = iter(range(100))
    sleep = time.sleep

    def writing(seconds: float) -> None:
        insert(database, [(f"a{next(ids)}", 1, "2026-01-01 00:00:00")])
        sleep(seconds)

    monkeypatch.setattr("eventpub.sources.mysql.checking.time.sleep", writing)
    check = found(config)["time zone"]
    assert (check.status, check.code) == ("wrong", "store.rows_in_past")
    assert "zone of the values they write" in str(check.suggestion)


@both
def test_a_local_time_without_a_number_to_watch_is_a_warning(database: FreshDatabase) -> None:
    """Nothing would show that writers keep another zone."""
    config = create(database, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    assert found(config)["order of insertion"].status == "ok"
    database.execute("ALTER TABLE events DROP COLUMN id")
    check = found(config)["order of insertion"]
    assert check.status == "warn"
    database.execute(str(check.suggestion))
    assert found(config)["order of insertion"].status == "ok"
    database.execute("INSERT INTO events VALUES ('a', 1, 't', '{}', NULL, CURRENT_TIMESTAMP(6))")
    database.execute("ALTER TABLE events DROP COLUMN seq, MODIFY create_time TIMESTAMP(6) NOT NULL")
    assert "order of insertion" not in found(config)


@both
def test_a_time_that_the_database_sets_in_utc_stays_so(database: FreshDatabase) -> None:
    """It counted as set by the writers, and the remedy would have made it local time."""
    config = create(database, create_time="DATETIME(6) DEFAULT (UTC_TIMESTAMP(6))")
    config = config.model_copy(update={"time_zone": "UTC"})
    assert found(config)["create_time"].status == "ok"
    database.execute(str(found(config)["rows without identity or time"].suggestion))
    [(_, made)] = database.execute("SHOW CREATE TABLE events")
    assert "utc_timestamp(6)" in made.lower()
    assert "current_timestamp" not in made.lower()
    assert found(config)["rows without identity or time"].status == "ok"


@both
@pytest.mark.parametrize(
    "computed",
    ["CONVERT_TZ(UTC_TIMESTAMP(6), '+00:00', '+09:00')", "UTC_TIMESTAMP(6) - INTERVAL 5 HOUR"],
)
def test_a_time_that_is_computed_from_utc_is_neither_read_in_utc_nor_replaced(
    database: FreshDatabase, computed: str
) -> None:
    """Events were lost, or published hours late; the remedy made new ones those of another zone."""
    config = create(database, create_time=f"DATETIME(6) DEFAULT ({computed})")
    zone = EventStore.discover(config).zone
    assert zone is not None
    assert zone.name != "UTC"
    proposed = str(found(config)["rows without identity or time"].suggestion)
    assert "make create_time NOT NULL" in proposed
    assert "CURRENT_TIMESTAMP" not in proposed


@both
def test_a_table_without_a_unique_key_is_a_warning(database: FreshDatabase) -> None:
    config = create(database, indexes="KEY (aggregate_id, version), KEY (create_time)")
    check = found(config)["identity of aggregates"]
    assert check.status == "warn"
    database.execute(str(check.suggestion))
    assert found(config)["identity of aggregates"].status == "ok"


@both
def test_an_account_with_select_alone_is_enough_and_is_told_what_it_cannot_see(
    database: FreshDatabase,
) -> None:
    create(database)
    user = f"c{database.name[-10:]}"
    database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'secret'")
    database.execute(f"GRANT SELECT ON {database.name}.events TO {user}@'%'")
    said = found(Store(url=database.url_of(user, "secret")))
    assert {name for name, check in said.items() if check.status != "ok"} == {
        "open transactions",
        "server",
    }
    for name in ("open transactions", "server"):
        grant = str(said[name].suggestion)
        assert grant.startswith("GRANT ")
        database.execute(grant)
    assert "secret" not in str(said)
    said = found(Store(url=database.url_of(user, "secret")))
    assert {check.status for check in said.values()} == {"ok"}
    # a table that this account may not see may not be there at all
    check = found(Store(url=database.url_of(user, "secret"), table="event"))["table"]
    assert (check.status, check.code) == ("wrong", "store.privilege_missing")
    grant, _, also = str(check.suggestion).partition("; ")
    assert grant.startswith("GRANT SELECT ON ")
    assert grant.endswith(f"`event` TO '{user}'@'%'")
    assert also.startswith("or, as the server does not say whether it exists: check store.table")
    database.execute(f"DROP USER {user}@'%'")


def test_a_forgotten_prepared_transaction_is_a_warning(database: FreshDatabase) -> None:
    """Gaps would stay open, and nothing said why."""
    config = create(database)
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("XA START 'forgotten'")
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', 1, 't')"
        )
        cursor.execute("XA END 'forgotten'")
        cursor.execute("XA PREPARE 'forgotten'")

    def warned() -> str:
        check = found(config)["open transactions"]
        return check.message if check.status == "warn" else ""

    # once the server has noticed that the session is gone; InnoDB's answer is a cache of 100 ms
    message = eventually(warned, every=0.2)
    database.execute("XA ROLLBACK 'forgotten'")
    assert "1 prepared XA transaction without a session: gaps seen since it" in message
    time.sleep(0.2)
    assert found(config)["open transactions"].status == "ok"


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_an_engine_whose_transactions_do_not_show_is_a_warning(database: FreshDatabase) -> None:
    config = create(database)
    assert found(config)["open transactions"].status == "ok"
    database.execute("ALTER TABLE events ENGINE = Aria")
    check = found(config)["open transactions"]
    assert check.status == "warn"
    assert "ENGINE = InnoDB" in str(check.suggestion)


def test_what_run_would_end_with_is_wrong_and_carries_its_code(database: FreshDatabase) -> None:
    create(database, indexes="UNIQUE KEY (aggregate_id, version)")
    (*_, last) = checks(Store(url=database.url))
    assert (last.status, last.code) == ("wrong", "store.index_missing")
    assert "ADD INDEX (`create_time`)" in str(last.suggestion)
    (*_, last) = checks(Store(url=database.url, table="none"))
    assert (last.status, last.code) == ("wrong", "store.table_missing")
    (last,) = checks(Store(url="mysql+pymysql://root@127.0.0.1:1/d"))
    assert (last.status, last.code) == ("wrong", "store.unreachable")


@pytest.mark.parametrize(
    ("zone", "column", "never_read"),
    [
        ("+09:00", "DATETIME(6)", 3),
        ("+09:00", "DATETIME", 3),
        ("-05:00", "DATETIME(6)", 1),
        ("+00:00", "DATETIME(6)", 2),
    ],
)
def test_the_first_moment_of_1970_is_that_of_the_zone(
    database: FreshDatabase, zone: str, column: str, never_read: int
) -> None:
    """As `FROM_UNIXTIME(0)` writes it: such a row is not read, which must be said."""
    create(database, create_time=column)
    at = [
        "1969-12-31 19:00:00",
        "1970-01-01 00:00:00",
        "1970-01-01 09:00:00",
        "1970-01-01 09:00:01",
    ]
    insert(database, ((f"a-{number}", 1, created) for number, created in enumerate(at)))
    config = Store(url=database.url, time_zone=zone)
    with EventStore(config, EventStore.discover(config)) as store:
        rows = sum(batch.num_rows for batch in store.window(0, store.now(), None))
        assert (rows, store.never_read()) == (len(at) - never_read, never_read)


@both
def test_rows_that_are_never_read_are_counted(database: FreshDatabase) -> None:
    config = create(database, create_time="DATETIME(6) NULL")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = ''")
        for number, time in enumerate([None, "0000-00-00", "1969-01-01", "2020-01-01"]):
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
                " VALUES ('a', %s, 'happened', '{}', %s)",
                (number, time),
            )
    check = found(config)["rows without identity or time"]
    assert check.status == "warn"
    assert check.message.startswith("3 rows have no create_time")
    assert "the publisher stops where a later version" in check.message


@pytest.mark.parametrize(
    ("database", "collation", "differences"),
    [
        ("mysql", "utf8mb4_0900_ai_ci", "case, accents or whatever else it ignores,"),
        ("mysql", "utf8mb4_0900_as_cs", "case, accents or whatever else it ignores,"),
        ("mysql", "utf8mb4_general_ci", "case, accents or whatever else it ignores,"),
        ("mysql", "utf8mb4_bin", "trailing blanks, so the database refuses one aggregate_id"),
        ("mysql", "latin1_bin", "trailing blanks,"),
        ("mysql", "ascii_bin", "trailing blanks,"),
        ("mariadb", "utf8mb4_bin", "trailing blanks,"),
        ("mariadb", "latin1_nopad_bin", None),
    ],
    indirect=["database"],
)
def test_which_ids_a_collation_takes_for_equal(
    database: FreshDatabase, collation: str, differences: str | None
) -> None:
    charset = collation.partition("_")[0]
    identity = f"VARCHAR(100) CHARACTER SET {charset} COLLATE {collation} NOT NULL"
    config = create(database, aggregate_id=identity)
    check = found(config)["identity of aggregates"]
    if differences is None:
        assert check.status == "ok"
    else:
        assert check.status == "warn"
        assert f"differ only in {differences}" in check.message
        # one that this server has
        wanted = str(check.suggestion).removeprefix("give the column the collation ").split(",")[0]
        kind = f"VARCHAR(100) CHARACTER SET utf8mb4 COLLATE {wanted}"
        database.execute(f"ALTER TABLE events MODIFY aggregate_id {kind}")
        assert found(config)["identity of aggregates"].status == "ok"


@both
def test_the_server_is_named_and_a_change_of_it_is_said(database: FreshDatabase) -> None:
    config = create(database)
    said = found(config)["server"]
    assert said.status == "ok"
    identity = said.message.split()[0]
    (again,) = [c for c in checks(config, identity) if c.name == "event store: server"]
    assert again.status == "ok"
    (other,) = [c for c in checks(config, "another") if c.name == "event store: server"]
    assert (other.status, "another" in other.message) == ("warn", True)


def test_a_machine_whose_clock_is_far_behind_is_told(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records would be as old, and gone before their time."""
    config = create(database)
    monkeypatch.setattr("eventpub.sources.mysql.checking.time.time", lambda: 0.0)
    check = found(config)["clock"]
    assert (check.status, check.suggestion) == ("warn", "set this machine's clock")
