"""What is found out of an event table, and which of its indexes are taken."""

from __future__ import annotations

import pickle
import tempfile

import pyarrow as pa
import pytest

from eventpub.config import Store
from eventpub.errors import StateError, StoreError
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql.statements import spooled
from tests.conftest import FreshDatabase
from tests.store.tables import SLICE, create, insert, open_store, utc

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
UNIQUE = "UNIQUE KEY by_key (aggregate_id, version)"


@both
def test_a_layout_travels_to_the_tasks(database: FreshDatabase) -> None:
    layout = EventStore.discover(
        create(database, create_time="DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP")
    )
    assert pickle.loads(pickle.dumps(layout)) == layout


@both
@pytest.mark.parametrize(
    ("indexes", "by_time", "by_key"),
    [
        (f"{UNIQUE}, KEY t (create_time)", "`t`", "`by_key`"),
        (f"{UNIQUE}, KEY t (create_time), {SLICE}, KEY s (create_time, slice)", "`s`", "`by_key`"),
        (f"{UNIQUE}, KEY wide (create_time, event_type, version)", "`wide`", "`by_key`"),
        (f"{UNIQUE}, KEY k (aggregate_id, version, id), KEY t (create_time)", "`t`", "`by_key`"),
        ("KEY k (aggregate_id, version), KEY t (create_time)", "`t`", "`k`"),
    ],
)
def test_the_best_index_is_taken(
    database: FreshDatabase, indexes: str, by_time: str, by_key: str
) -> None:
    layout = EventStore.discover(create(database, indexes=indexes))
    assert (layout.time_index, layout.key_index) == (by_time, by_key)
    assert layout.key_is_unique == ("UNIQUE" in indexes)


@both
def test_an_index_that_the_optimizer_may_not_use_does_not_count(database: FreshDatabase) -> None:
    config = create(database, indexes=f"{UNIQUE}, KEY t (create_time)")
    hidden = "IGNORED" if "Maria" in database.server.name else "INVISIBLE"
    database.execute(f"ALTER TABLE events ALTER INDEX t {hidden}")
    with pytest.raises(StoreError, match="create_time") as caught:
        EventStore.discover(config)
    assert caught.value.code == "store.index_missing"


@both
@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("CRC32(aggregate_id) % 1024", True),
        ("MOD(CRC32(aggregate_id), 1024)", True),
        ("CRC32(aggregate_id) % 512", False),
        ("CRC32(event_type) % 1024", False),
    ],
)
def test_a_slice_column_is_known_by_what_it_computes(
    database: FreshDatabase, expression: str, found: bool
) -> None:
    create(database)
    database.execute(
        f"ALTER TABLE events ADD COLUMN bucket INT GENERATED ALWAYS AS ({expression}) STORED"
    )
    layout = EventStore.discover(Store(url=database.url))
    assert layout.slice == ("`bucket`" if found else None)


@both
def test_a_primary_key_of_aggregate_and_version_is_enough(database: FreshDatabase) -> None:
    database.execute(
        "CREATE TABLE events (aggregate_id VARCHAR(50), version INT, event_type TEXT, payload TEXT,"
        " create_time TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP(3),"
        " PRIMARY KEY (aggregate_id, version), KEY (create_time))"
    )
    layout = EventStore.discover(Store(url=database.url))
    assert (layout.id, layout.metadata, layout.unit) == (None, None, 1_000)
    assert layout.key_index == "`PRIMARY`"
    assert layout.key_is_unique


@both
def test_an_aggregates_number_does_not_tell_what_was_inserted_last(
    database: FreshDatabase,
) -> None:
    """Rows with times of the past were not noticed: the newest were those of the last aggregate."""
    database.execute(
        "CREATE TABLE events (id BIGINT NOT NULL, version INT NOT NULL, event_type TEXT,"
        " payload TEXT, create_time DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " seq BIGINT NOT NULL AUTO_INCREMENT, PRIMARY KEY (id, version), KEY s (seq),"
        " KEY (create_time))"
    )
    store = Store.model_validate({"url": database.url, "columns": {"aggregate_id": "id"}})
    assert (EventStore.discover(store).id, EventStore.discover(store).id_index) == ("`seq`", "`s`")
    database.execute("ALTER TABLE events DROP COLUMN seq")
    assert EventStore.discover(store).id is None


@both
def test_a_number_that_may_be_null_is_not_the_id(database: FreshDatabase) -> None:
    """Where it was NULL, no publisher could start: a TypeError."""
    config = create(database)
    database.execute("ALTER TABLE events RENAME COLUMN id TO seq, ADD id BIGINT NULL, ADD KEY (id)")
    insert(database, [("a", 1, "2026-03-01 12:00:00")])
    assert open_store(config).newest(1)[0].id == 1
    database.execute("ALTER TABLE events DROP COLUMN seq")
    assert open_store(config).newest(1)[0].id == utc("2026-03-01 12:00:00")


def test_no_column_is_added_for_a_misspelt_name(database: FreshDatabase) -> None:
    config = create(database)
    said = {}
    for name in ("create_tmie", "happened"):
        columns = config.columns.model_copy(update={"create_time": name})
        with pytest.raises(StoreError) as caught:
            EventStore.discover(config.model_copy(update={"columns": columns}))
        assert caught.value.code == "store.column_missing"
        said[name] = caught.value.suggestion or ""
    assert "name the right one" in said["create_tmie"]
    assert "ADD COLUMN `happened`" in said["happened"]


def test_what_fits_into_memory_needs_no_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose disk is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    rows = pa.record_batch({"n": [*range(1000)]})
    assert [*spooled([rows], 1 << 20)] == [rows]
    with pytest.raises(StateError, match="set TMPDIR") as failed:
        [*spooled([rows], 1)]
    assert failed.value.retriable
