"""Event tables as frameworks create them, each with some rows, and what is to be published.

Written from each framework's documented schema. What differs between MySQL and MariaDB is a
placeholder: `{json}` is a column of JSON, `{not_null}` what a generated column may carry.
"""

# ruff: noqa: S608, E501 (tables and rows)

from __future__ import annotations

import re
from dataclasses import dataclass, field

A, B = "11111111-aaaa-4aaa-8aaa-000000000001", "11111111-aaaa-4aaa-8aaa-000000000002"
FIRST, SECOND = f"UUID_{A}", f"UUID_{B}"
"""Written into the statements as 16 bytes."""

PLACEHOLDERS = {
    "mysql": {"{json}": "JSON", "{not_null}": "NOT NULL"},
    "mariadb": {"{json}": "LONGTEXT", "{not_null}": ""},
}


@dataclass(frozen=True)
class Layout:
    """A framework's tables.

    Attributes:
        name: of the framework, as `init` calls it; "": it is not to be recognised.
        table: its event table.
        columns: what `init` is to write below [store.columns].
        store: what `init` is to write below [store] beside url, table and columns.
        statements: make the tables and rows.
        published: key → versions of each record that the topic is to have.
        types: key and version → ce_type, of some records.
        adds: what the statements that `init` prints are to add, in the order of the table.
    """

    name: str
    table: str
    columns: dict[str, str | list[str]]
    statements: tuple[str, ...]
    published: dict[str, list[int]]
    store: dict[str, object] = field(default_factory=dict)
    types: dict[tuple[str, int], str] = field(default_factory=dict)
    adds: tuple[str, ...] = ()

    def sql(self, server: str) -> list[str]:
        """The statements for one server: "mysql" or "mariadb"."""
        return [adapted(statement, server) for statement in self.statements]


def adapted(statement: str, server: str) -> str:
    """A statement for one server."""
    for placeholder, value in PLACEHOLDERS[server].items():
        statement = statement.replace(placeholder, value)
    return re.sub(
        r"UUID_([0-9a-f-]{36})", lambda found: f"X'{found[1].replace('-', '')}'", statement
    )


PROOPH = Layout(
    "prooph",
    "_7f1c0a5be2",
    {
        "id": "no",
        "aggregate_id": ["aggregate_type", "aggregate_id"],
        "version": "aggregate_version",
        "event_type": "event_name",
        "create_time": "created_at",
    },
    (
        "CREATE TABLE event_streams (no BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
        " real_stream_name VARCHAR(150) NOT NULL UNIQUE, stream_name CHAR(41) NOT NULL,"
        " metadata {json}, category VARCHAR(150))",
        "CREATE TABLE projections (no BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, name VARCHAR(150)"
        " NOT NULL UNIQUE, position {json}, state {json}, status VARCHAR(28) NOT NULL,"
        " locked_until CHAR(26))",
        "CREATE TABLE _7f1c0a5be2 (no BIGINT NOT NULL AUTO_INCREMENT, event_id CHAR(36) NOT NULL,"
        " event_name VARCHAR(100) NOT NULL, payload {json} NOT NULL, metadata {json} NOT NULL,"
        " created_at DATETIME(6) NOT NULL,"
        " aggregate_version INT UNSIGNED GENERATED ALWAYS AS"
        " (JSON_EXTRACT(metadata, '$._aggregate_version')) STORED {not_null},"
        " aggregate_id CHAR(36) GENERATED ALWAYS AS"
        " (JSON_UNQUOTE(JSON_EXTRACT(metadata, '$._aggregate_id'))) STORED {not_null},"
        " aggregate_type VARCHAR(150) GENERATED ALWAYS AS"
        " (JSON_UNQUOTE(JSON_EXTRACT(metadata, '$._aggregate_type'))) STORED {not_null},"
        " PRIMARY KEY (no), UNIQUE KEY ix_event_id (event_id), UNIQUE KEY ix_unique_event"
        " (aggregate_type, aggregate_id, aggregate_version), KEY ix_query_aggregate"
        " (aggregate_type, aggregate_id, no)) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin",
        f"""INSERT INTO _7f1c0a5be2 (event_id, event_name, payload, metadata, created_at) VALUES
        ('e1', 'order.placed', '{{"total":12}}', '{{"_aggregate_id":"{A}","_aggregate_type":"Order",
        "_aggregate_version":1,"_causation_id":"c-1"}}', NOW(6) - INTERVAL 3 HOUR),
        ('e2', 'order.paid', '{{}}', '{{"_aggregate_id":"{A}","_aggregate_type":"Order",
        "_aggregate_version":2}}', NOW(6) - INTERVAL 2 HOUR),
        ('e3', 'order.placed', '{{}}', '{{"_aggregate_id":"{B}","_aggregate_type":"Order",
        "_aggregate_version":1}}', NOW(6) - INTERVAL 1 HOUR),
        ('e4', 'invoice.written', '{{}}', '{{"_aggregate_id":"{A}","_aggregate_type":"Invoice",
        "_aggregate_version":1}}', NOW(6) - INTERVAL 1 HOUR)""",
    ),
    {f"Order|{A}": [1, 2], f"Order|{B}": [1], f"Invoice|{A}": [1]},
    types={(f"Invoice|{A}", 1): "invoice.written"},
    adds=("ADD INDEX (`created_at`)",),
)

PATCHLEVEL_AGGREGATE = Layout(
    "patchlevel, aggregate store",
    "event_store",
    {
        "aggregate_id": ["aggregate", "aggregate_id"],
        "version": "playhead",
        "event_type": "event",
        "metadata": "custom_headers",
        "create_time": "recorded_on",
    },
    (
        "CREATE TABLE event_store (id BIGINT AUTO_INCREMENT NOT NULL, aggregate VARCHAR(255) NOT"
        " NULL, aggregate_id CHAR(36) NOT NULL, playhead INT NOT NULL, event VARCHAR(255) NOT NULL,"
        " payload JSON NOT NULL, recorded_on DATETIME NOT NULL, new_stream_start TINYINT(1)"
        " DEFAULT 0 NOT NULL, archived TINYINT(1) DEFAULT 0 NOT NULL, custom_headers JSON NOT NULL,"
        " PRIMARY KEY (id), UNIQUE KEY (aggregate, aggregate_id, playhead),"
        " KEY (aggregate, aggregate_id, playhead, archived))"
        " DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        "CREATE TABLE subscriptions (id VARCHAR(255) PRIMARY KEY, group_name VARCHAR(32) NOT NULL,"
        " status VARCHAR(32) NOT NULL, position INT NOT NULL, last_saved_at DATETIME NOT NULL)",
        f"""INSERT INTO event_store (aggregate, aggregate_id, playhead, event, payload, recorded_on,
        custom_headers) VALUES
        ('hotel', '{A}', 1, 'hotel.created', '{{"n":1}}', NOW() - INTERVAL 40 MINUTE, '{{"u":"x"}}'),
        ('hotel', '{A}', 2, 'hotel.guest_in', '{{}}', NOW() - INTERVAL 30 MINUTE, '[]'),
        ('review', '{A}', 1, 'review.written', '{{}}', NOW() - INTERVAL 20 MINUTE, '[]')""",
    ),
    {f"hotel|{A}": [1, 2], f"review|{A}": [1]},
    types={(f"hotel|{A}", 1): "hotel.created"},
    adds=("ADD INDEX (`recorded_on`)",),
)

PATCHLEVEL_STREAM = Layout(
    "patchlevel, stream store",
    "event_store",
    {
        "aggregate_id": "stream",
        "version": "playhead",
        "event_type": "event_name",
        "payload": "event_payload",
        "metadata": "custom_headers",
        "create_time": "recorded_on",
    },
    (
        "CREATE TABLE event_store (id BIGINT AUTO_INCREMENT NOT NULL, stream VARCHAR(255) NOT NULL,"
        " playhead INT DEFAULT NULL, event_id VARCHAR(255) NOT NULL, event_name VARCHAR(255) NOT"
        " NULL, event_payload JSON NOT NULL, recorded_on DATETIME NOT NULL, archived TINYINT(1)"
        " DEFAULT 0 NOT NULL, custom_headers JSON NOT NULL, PRIMARY KEY (id), UNIQUE KEY (event_id),"
        " UNIQUE KEY (stream, playhead), KEY (stream, playhead, archived))"
        " DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        """INSERT INTO event_store (stream, playhead, event_id, event_name, event_payload,
        recorded_on, custom_headers) VALUES
        ('hotel-1', 1, 'p1', 'hotel.created', '{"n":1}', NOW() - INTERVAL 40 MINUTE, '{"u":"x"}'),
        ('hotel-1', 2, 'p2', 'hotel.guest_in', '{}', NOW() - INTERVAL 40 MINUTE, '[]'),
        ('imports', NULL, 'p3', 'import.done', '{}', NOW() - INTERVAL 30 MINUTE, '[]')""",
    ),
    {"hotel-1": [1, 2]},
    store={"without_identity": "skip"},
    types={("hotel-1", 1): "hotel.created"},
    adds=("ADD INDEX (`recorded_on`)",),
)

SPATIE = Layout(
    "spatie",
    "stored_events",
    {
        "aggregate_id": "aggregate_uuid",
        "version": "aggregate_version",
        "event_type": "event_class",
        "payload": "event_properties",
        "metadata": "meta_data",
        "create_time": "created_at",
    },
    (
        "CREATE TABLE snapshots (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, aggregate_uuid"
        " CHAR(36) NOT NULL, aggregate_version BIGINT UNSIGNED NOT NULL, state JSON NOT NULL,"
        " created_at TIMESTAMP NULL, updated_at TIMESTAMP NULL, KEY (aggregate_uuid))",
        "CREATE TABLE stored_events (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, aggregate_uuid"
        " CHAR(36) NULL, aggregate_version BIGINT UNSIGNED NULL, event_version TINYINT UNSIGNED NOT"
        " NULL DEFAULT 1, event_class VARCHAR(255) NOT NULL, event_properties JSON NOT NULL,"
        " meta_data JSON NOT NULL, created_at TIMESTAMP NOT NULL, KEY (event_class),"
        " KEY (aggregate_uuid), UNIQUE KEY (aggregate_uuid, aggregate_version))"
        " DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        f"""INSERT INTO stored_events (aggregate_uuid, aggregate_version, event_class,
        event_properties, meta_data, created_at) VALUES
        ('{A}', 1, 'Opened', '{{"n":1}}', '{{"stored-event-id":1}}', NOW() - INTERVAL 1 HOUR),
        ('{A}', 2, 'Paid', '{{}}', '[]', NOW() - INTERVAL 1 HOUR),
        (NULL, NULL, 'NewsletterSent', '{{}}', '[]', NOW() - INTERVAL 30 MINUTE),
        (NULL, NULL, 'NewsletterSent', '{{}}', '[]', NOW() - INTERVAL 29 MINUTE),
        ('{B}', 1, 'Opened', '{{}}', '[]', NOW() - INTERVAL 20 MINUTE)""",
    ),
    {A: [1, 2], B: [1]},
    store={"without_identity": "skip"},
    types={(A, 2): "Paid"},
    adds=("ADD INDEX (`created_at`)",),
)

AXON = Layout(
    "Axon 4",
    "domain_event_entry",
    {
        "id": "global_index",
        "aggregate_id": "aggregate_identifier",
        "version": "sequence_number",
        "event_type": "payload_type",
    },
    (
        "CREATE TABLE domain_event_entry (global_index BIGINT AUTO_INCREMENT PRIMARY KEY,"
        " event_identifier VARCHAR(255) NOT NULL UNIQUE, meta_data LONGBLOB, payload LONGBLOB NOT"
        " NULL, payload_revision VARCHAR(255), payload_type VARCHAR(255) NOT NULL, time_stamp"
        " VARCHAR(255) NOT NULL, aggregate_identifier VARCHAR(255) NOT NULL, sequence_number BIGINT"
        " NOT NULL, type VARCHAR(255), UNIQUE KEY (aggregate_identifier, sequence_number))",
        "CREATE TABLE snapshot_event_entry (aggregate_identifier VARCHAR(255) NOT NULL,"
        " sequence_number BIGINT NOT NULL, type VARCHAR(255) NOT NULL, event_identifier"
        " VARCHAR(255) NOT NULL UNIQUE, meta_data LONGBLOB, payload LONGBLOB NOT NULL,"
        " payload_revision VARCHAR(255), payload_type VARCHAR(255) NOT NULL, time_stamp"
        " VARCHAR(255) NOT NULL, PRIMARY KEY (aggregate_identifier, sequence_number, type))",
        f"""INSERT INTO domain_event_entry (event_identifier, meta_data, payload, payload_type,
        time_stamp, aggregate_identifier, sequence_number, type) VALUES
        ('e1', '<m/>', '<e/>', 'shop.Created', '2026-11-01T00:00:00Z', '{A}', 0, 'Order'),
        ('e2', '<m/>', '<e/>', 'shop.Paid', '2026-11-01T00:00:01Z', '{A}', 1, 'Order'),
        ('e3', '<m/>', '<e/>', 'shop.Tick', '2026-11-01T00:00:01Z', '{B}', 0, NULL)""",
    ),
    {A: [0, 1], B: [0]},
    store={"first_version": 0},
    types={(A, 0): "shop.Created"},
    adds=("ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

AXON_5 = Layout(
    "Axon 5",
    "aggregate_event_entry",
    {
        "id": "global_index",
        "aggregate_id": "aggregate_identifier",
        "version": "aggregate_sequence_number",
        "event_type": "type",
        "metadata": "",
    },
    (
        "CREATE TABLE aggregate_event_entry (global_index BIGINT NOT NULL PRIMARY KEY, identifier"
        " VARCHAR(255) NOT NULL UNIQUE, type VARCHAR(255) NOT NULL, version VARCHAR(255) NOT NULL,"
        " payload LONGBLOB NOT NULL, metadata LONGBLOB, timestamp VARCHAR(255) NOT NULL,"
        " aggregate_type VARCHAR(255), aggregate_identifier VARCHAR(255),"
        " aggregate_sequence_number BIGINT NOT NULL,"
        " UNIQUE KEY (aggregate_identifier, aggregate_sequence_number))",
        f"""INSERT INTO aggregate_event_entry (global_index, identifier, type, version, payload,
        metadata, timestamp, aggregate_type, aggregate_identifier, aggregate_sequence_number) VALUES
        (1, 'e1', 'shop.Created', '0.0.1', '{{}}', X'00FF', '2026-11-01T00:00:00Z', 'O', '{A}', 0),
        (2, 'e2', 'shop.Paid', '0.0.1', '{{}}', X'00FF', '2026-11-01T00:00:01Z', 'O', '{A}', 1)""",
    ),
    {A: [0, 1]},
    store={"first_version": 0, "without_identity": "skip"},
    types={(A, 0): "shop.Created"},
    adds=("ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

AKKA_JDBC = Layout(
    "Akka or Pekko, JDBC",
    "event_journal",
    {
        "id": "ordering",
        "aggregate_id": "persistence_id",
        "version": "sequence_number",
        "event_type": "event_ser_manifest",
        "payload": "event_payload",
    },
    (
        "CREATE TABLE event_journal (ordering SERIAL, deleted BOOLEAN DEFAULT FALSE NOT NULL,"
        " persistence_id VARCHAR(255) NOT NULL, sequence_number BIGINT NOT NULL, writer TEXT NOT"
        " NULL, write_timestamp BIGINT NOT NULL, adapter_manifest TEXT NOT NULL, event_payload BLOB"
        " NOT NULL, event_ser_id INTEGER NOT NULL, event_ser_manifest TEXT NOT NULL, meta_payload"
        " BLOB, meta_ser_id INTEGER, meta_ser_manifest TEXT,"
        " PRIMARY KEY (persistence_id, sequence_number))",
        "CREATE TABLE event_tag (event_id BIGINT UNSIGNED NOT NULL, tag VARCHAR(255) NOT NULL,"
        " PRIMARY KEY (event_id, tag),"
        " FOREIGN KEY (event_id) REFERENCES event_journal (ordering) ON DELETE CASCADE)",
        "CREATE TABLE snapshot (persistence_id VARCHAR(255) NOT NULL, sequence_number BIGINT NOT"
        " NULL, created BIGINT NOT NULL, snapshot_ser_id INTEGER NOT NULL, snapshot_ser_manifest"
        " TEXT NOT NULL, snapshot_payload BLOB NOT NULL, meta_ser_id INTEGER, meta_ser_manifest"
        " TEXT, meta_payload BLOB, PRIMARY KEY (persistence_id, sequence_number))",
        "CREATE TABLE durable_state (global_offset SERIAL, persistence_id VARCHAR(255) NOT NULL,"
        " revision BIGINT NOT NULL, state_payload BLOB NOT NULL, state_serial_id INTEGER NOT NULL,"
        " state_serial_manifest VARCHAR(255), tag VARCHAR(255), state_timestamp BIGINT NOT NULL,"
        " PRIMARY KEY (persistence_id), KEY (tag))",
        """INSERT INTO event_journal (ordering, deleted, persistence_id, sequence_number, writer,
        write_timestamp, adapter_manifest, event_payload, event_ser_id, event_ser_manifest,
        meta_payload, meta_ser_id, meta_ser_manifest) VALUES
        (4, TRUE, 'Cart|c-1', 1, 'w', 1790000000000, '', X'0AFF', 20, 'Opened', X'08FF', 11, 'm'),
        (5, FALSE, 'Cart|c-1', 2, 'w', 1790000000001, '', X'0AFE', 20, '', NULL, NULL, NULL),
        (9, FALSE, 'Cart|c-2', 1, 'w', 1790000000002, '', X'0A', 20, 'Opened', NULL, NULL, NULL)""",
    ),
    {"Cart|c-1": [1, 2], "Cart|c-2": [1]},
    types={("Cart|c-1", 1): "Opened"},
    adds=("ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

PEKKO_R2DBC = Layout(
    "Akka or Pekko, R2DBC",
    "event_journal",
    {
        "aggregate_id": "persistence_id",
        "version": "seq_nr",
        "event_type": "event_ser_manifest",
        "payload": "event_payload",
        "create_time": "db_timestamp",
    },
    (
        "CREATE TABLE event_journal (slice INT NOT NULL, entity_type VARCHAR(255) NOT NULL,"
        " persistence_id VARCHAR(255) NOT NULL, seq_nr BIGINT NOT NULL, db_timestamp DATETIME(6)"
        " NOT NULL, event_ser_id INTEGER NOT NULL, event_ser_manifest VARCHAR(255) NOT NULL,"
        " event_payload BLOB NOT NULL, deleted BOOLEAN DEFAULT FALSE NOT NULL, writer VARCHAR(255)"
        " NOT NULL, adapter_manifest VARCHAR(255), tags TEXT, meta_ser_id INTEGER,"
        " meta_ser_manifest VARCHAR(255), meta_payload BLOB, PRIMARY KEY (persistence_id, seq_nr))",
        "CREATE INDEX event_journal_slice_idx"
        " ON event_journal (slice, entity_type, db_timestamp, seq_nr)",
        "CREATE TABLE snapshot (slice INT NOT NULL, entity_type VARCHAR(255) NOT NULL,"
        " persistence_id VARCHAR(255) NOT NULL PRIMARY KEY, seq_nr BIGINT NOT NULL, write_timestamp"
        " BIGINT NOT NULL, ser_id INTEGER NOT NULL, ser_manifest VARCHAR(255) NOT NULL,"
        " snapshot BLOB NOT NULL, meta_ser_id INTEGER)",
        "CREATE TABLE durable_state (slice INT NOT NULL, entity_type VARCHAR(255) NOT NULL,"
        " persistence_id VARCHAR(255) NOT NULL, revision BIGINT NOT NULL, db_timestamp DATETIME(6)"
        " NOT NULL, state_ser_id INTEGER NOT NULL, state_ser_manifest VARCHAR(255), state_payload"
        " BLOB NOT NULL, tags TEXT, PRIMARY KEY (persistence_id, revision))",
        "INSERT INTO durable_state VALUES (1, 'Cart', 'd', 1, NOW(6), 1, 'm', X'00', NULL)",
        """INSERT INTO event_journal (slice, entity_type, persistence_id, seq_nr, db_timestamp,
        event_ser_id, event_ser_manifest, event_payload, writer) VALUES
        (7, 'Cart', 'Cart|c-1', 1, NOW(6) - INTERVAL 1 HOUR, 20, 'Opened', X'0AFF', 'w'),
        (7, 'Cart', 'Cart|c-1', 2, NOW(6) - INTERVAL 1 HOUR, 20, '', X'0AFE', 'w')""",
    ),
    {"Cart|c-1": [1, 2]},
    types={("Cart|c-1", 1): "Opened"},
    adds=("ADD INDEX (`db_timestamp`)",),
)

EVENTSAUCE = Layout(
    "EventSauce",
    "order_messages",
    {"aggregate_id": "aggregate_root_id"},
    (
        "CREATE TABLE order_messages (id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT, event_id"
        " BINARY(16) NOT NULL, aggregate_root_id BINARY(16) NOT NULL, version INT UNSIGNED NULL,"
        " payload VARCHAR(16001) NOT NULL, PRIMARY KEY (id ASC), KEY reconstitution"
        " (aggregate_root_id, version ASC)) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
        "CREATE TABLE outbox_messages (id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,"
        " consumed TINYINT UNSIGNED NOT NULL DEFAULT 0, payload VARCHAR(16001) NOT NULL,"
        " KEY is_consumed (consumed, id))",
        f"""INSERT INTO order_messages (event_id, aggregate_root_id, version, payload) VALUES
        (UUID_TO, {FIRST}, 1, '{{"headers":{{"__event_type":"order.placed"}},"payload":{{}}}}'),
        (UUID_TO, {FIRST}, 2, '{{"headers":{{"__event_type":"order.paid"}},"payload":{{}}}}'),
        (UUID_TO, {SECOND}, 1, '{{"headers":{{"__event_type":"order.placed"}},"payload":{{}}}}')
        """.replace("UUID_TO", FIRST),
    ),
    {A: [1, 2], B: [1]},
    types={(A, 2): "order.paid"},
    adds=(
        "ADD COLUMN `event_type`",
        "ADD COLUMN `create_time`",
        "ADD UNIQUE INDEX (`aggregate_root_id`, `version`)",
        "ADD INDEX (`create_time`)",
    ),
)

EVENTSAUCE_0 = Layout(
    "EventSauce, before 1.0",
    "domain_messages",
    {
        "aggregate_id": "aggregate_root_id",
        "version": "aggregate_root_version",
        "create_time": "time_of_recording",
    },
    (
        "CREATE TABLE domain_messages (event_id VARCHAR(36) NOT NULL, event_type VARCHAR(100) NOT"
        " NULL, aggregate_root_id VARCHAR(36) NOT NULL, aggregate_root_version MEDIUMINT UNSIGNED"
        " NOT NULL, time_of_recording DATETIME(6) NOT NULL, payload JSON NOT NULL, INDEX"
        " (aggregate_root_id), UNIQUE KEY (aggregate_root_id, aggregate_root_version))"
        " CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
        f"""INSERT INTO domain_messages VALUES
        ('e1', 'order.placed', '{A}', 1, NOW(6) - INTERVAL 1 HOUR, '{{"a":1}}'),
        ('e2', 'order.paid', '{A}', 2, NOW(6) - INTERVAL 1 HOUR, '{{}}')""",
    ),
    {A: [1, 2]},
    types={(A, 2): "order.paid"},
    adds=("ADD INDEX (`time_of_recording`)",),
)

BROADWAY = Layout(
    "Broadway",
    "events",
    {
        "aggregate_id": "uuid",
        "version": "playhead",
        "event_type": "type",
    },
    (
        "CREATE TABLE events (id INT AUTO_INCREMENT NOT NULL, uuid CHAR(36) NOT NULL, playhead INT"
        " UNSIGNED NOT NULL, payload LONGTEXT NOT NULL, metadata LONGTEXT NOT NULL, recorded_on"
        " VARCHAR(32) NOT NULL, type LONGTEXT NOT NULL, UNIQUE INDEX (uuid, playhead),"
        " PRIMARY KEY (id)) DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        f"""INSERT INTO events (uuid, playhead, payload, metadata, recorded_on, type) VALUES
        ('{A}', 0, '{{"class":"Made","payload":{{}}}}', '{{"class":"M","payload":[]}}',
        '2026-11-01T00:00:00.000000+00:00', 'shop.Made'),
        ('{A}', 1, '{{"class":"Paid","payload":{{}}}}', '{{"class":"M","payload":[]}}',
        '2026-11-01T00:00:01.000000+00:00', 'shop.Paid')""",
    ),
    {A: [0, 1]},
    store={"first_version": 0},
    types={(A, 0): "shop.Made"},
    adds=("ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

BROADWAY_BINARY = Layout(
    "Broadway",
    "events",
    BROADWAY.columns,
    (
        BROADWAY.statements[0].replace("uuid CHAR(36)", "uuid BINARY(16)"),
        BROADWAY.statements[1].replace(f"'{A}'", FIRST),
    ),
    {A: [0, 1]},
    store={"first_version": 0},
    adds=BROADWAY.adds,
)

NEOS = Layout(
    "Neos",
    "cr_default_events",
    {
        "id": "sequencenumber",
        "aggregate_id": "stream",
        "event_type": "type",
        "create_time": "recordedat",
    },
    (
        "CREATE TABLE cr_default_events (sequencenumber BIGINT UNSIGNED AUTO_INCREMENT NOT NULL,"
        " stream VARCHAR(100) CHARACTER SET ascii NOT NULL, version BIGINT UNSIGNED NOT NULL, type"
        " VARCHAR(100) CHARACTER SET ascii NOT NULL, payload LONGTEXT NOT NULL, metadata JSON"
        " DEFAULT NULL, id CHAR(36) CHARACTER SET ascii NOT NULL, causationid VARCHAR(36) CHARACTER"
        " SET ascii DEFAULT NULL, correlationid VARCHAR(36) CHARACTER SET ascii DEFAULT NULL,"
        " recordedat DATETIME NOT NULL, UNIQUE INDEX (id), UNIQUE INDEX (stream, version),"
        " INDEX (correlationid), PRIMARY KEY (sequencenumber)) DEFAULT CHARACTER SET utf8mb4",
        f"""INSERT INTO cr_default_events (stream, version, type, payload, metadata, id, recordedat)
        VALUES ('Workspace:live', 0, 'RootWorkspaceWasCreated', '{{}}', '{{"initiating":"u"}}',
        '{A}', NOW() - INTERVAL 1 HOUR), ('Workspace:live', 1, 'WorkspaceWasRenamed', '{{}}', NULL,
        '{B}', NOW() - INTERVAL 1 HOUR)""",
    ),
    {"Workspace:live": [0, 1]},
    store={"first_version": 0},
    types={("Workspace:live", 1): "WorkspaceWasRenamed"},
    adds=("ADD INDEX (`recordedat`)",),
)

PYEVENTSOURCING = Layout(
    "Python eventsourcing",
    "bankaccounts_events",
    {
        "aggregate_id": "originator_id",
        "version": "originator_version",
        "event_type": "topic",
        "payload": "state",
    },
    (
        "CREATE TABLE bankaccounts_events (id BIGINT NOT NULL AUTO_INCREMENT, originator_id"
        " BINARY(16) NOT NULL, originator_version BIGINT NOT NULL, topic TEXT NOT NULL, state BLOB"
        " NOT NULL, PRIMARY KEY (id),"
        " UNIQUE INDEX stored_aggregate_event_index (originator_id, originator_version))",
        "CREATE TABLE bankaccounts_snapshots (originator_id BINARY(16) NOT NULL,"
        " originator_version BIGINT NOT NULL, topic TEXT NOT NULL, state BLOB NOT NULL,"
        " PRIMARY KEY (originator_id, originator_version))",
        f"INSERT INTO bankaccounts_snapshots VALUES ({FIRST}, 2, 'bank:Account', '{{}}')",
        f"""INSERT INTO bankaccounts_events (originator_id, originator_version, topic, state) VALUES
        ({FIRST}, 1, 'bank:Account.Opened', '{{"a":1}}'),
        ({FIRST}, 2, 'bank:Account.Paid', '{{}}'), ({SECOND}, 1, 'bank:Account.Opened', '{{}}')""",
    ),
    {A: [1, 2], B: [1]},
    types={(A, 2): "bank:Account.Paid"},
    adds=("ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

NEVENTSTORE = Layout(
    "NEventStore",
    "Commits",
    {
        "id": "CheckpointNumber",
        "aggregate_id": ["BucketId", "StreamId"],
        "version": "CommitSequence",
        "payload": "Payload",
    },
    (
        "CREATE TABLE Commits (BucketId VARCHAR(40) CHARACTER SET utf8mb3 NOT NULL, StreamId"
        " VARCHAR(40) CHARACTER SET utf8mb3 NOT NULL, StreamIdOriginal VARCHAR(1000) CHARACTER SET"
        " utf8mb3 NOT NULL, StreamRevision INT NOT NULL CHECK (StreamRevision > 0), Items INT NOT"
        " NULL CHECK (Items > 0), CommitId BINARY(16) NOT NULL, CommitSequence INT NOT NULL CHECK"
        " (CommitSequence > 0), CommitStamp BIGINT NOT NULL, CheckpointNumber BIGINT"
        " AUTO_INCREMENT, Headers BLOB NULL, Payload MEDIUMBLOB NOT NULL,"
        " PRIMARY KEY (CheckpointNumber))",
        "CREATE UNIQUE INDEX IX_Commits ON Commits (BucketId, StreamId, CommitSequence)",
        "CREATE UNIQUE INDEX IX_Commits_CommitId ON Commits (BucketId, StreamId, CommitId)",
        "CREATE UNIQUE INDEX IX_Commits_Revisions"
        " ON Commits (BucketId, StreamId, StreamRevision, Items)",
        "CREATE INDEX IX_Commits_Stamp ON Commits (CommitStamp)",
        "CREATE TABLE Snapshots (BucketId VARCHAR(40) CHARACTER SET utf8mb3 NOT NULL, StreamId"
        " VARCHAR(40) CHARACTER SET utf8mb3 NOT NULL, StreamRevision INT NOT NULL, Payload BLOB NOT"
        " NULL, PRIMARY KEY (BucketId, StreamId, StreamRevision))",
        f"""INSERT INTO Commits (BucketId, StreamId, StreamIdOriginal, StreamRevision, Items,
        CommitId, CommitSequence, CommitStamp, Headers, Payload) VALUES
        ('default', 'aa', 'order-1', 2, 2, {FIRST}, 1, 638000000000000000, X'8100', X'92'),
        ('default', 'aa', 'order-1', 5, 3, {SECOND}, 2, 638000000000000001, X'8100', X'93'),
        ('tenant', 'aa', 'order-1', 1, 1, {FIRST}, 1, 638000000000000002, NULL, X'91')""",
    ),
    {"default|aa": [1, 2], "tenant|aa": [1]},
    types={("default|aa", 1): "commit"},
    adds=("ADD COLUMN `event_type`", "ADD COLUMN `create_time`", "ADD INDEX (`create_time`)"),
)

SQLSTREAMSTORE = Layout(
    "SQLStreamStore",
    "messages",
    {
        "id": "position",
        "aggregate_id": "stream_id_internal",
        "version": "stream_version",
        "event_type": "type",
        "payload": "json_data",
        "metadata": "json_metadata",
        "create_time": "created_utc",
    },
    (
        "CREATE TABLE streams (id CHAR(42) NOT NULL, id_original VARCHAR(1000) NOT NULL, id_internal"
        " INT NOT NULL AUTO_INCREMENT, version INT NOT NULL DEFAULT -1, position BIGINT NOT NULL"
        " DEFAULT -1, max_age INT NULL, max_count INT NULL, PRIMARY KEY (id_internal), UNIQUE (id))"
        " CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        "CREATE TABLE messages (stream_id_internal INT NOT NULL, stream_version INT NOT NULL,"
        " position BIGINT NOT NULL AUTO_INCREMENT, message_id BINARY(16) NOT NULL, created_utc"
        " TIMESTAMP NOT NULL, type VARCHAR(128) NOT NULL, json_data LONGTEXT NOT NULL,"
        " json_metadata LONGTEXT, PRIMARY KEY (position), FOREIGN KEY (stream_id_internal)"
        " REFERENCES streams (id_internal), UNIQUE KEY (stream_id_internal, stream_version), UNIQUE"
        " KEY (stream_id_internal, message_id), CHECK (stream_version >= 0))"
        " CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        "INSERT INTO streams (id, id_original) VALUES ('h1', 'order-1'), ('h2', 'order-2')",
        f"""INSERT INTO messages (stream_id_internal, stream_version, message_id, created_utc, type,
        json_data, json_metadata) VALUES
        (1, 0, {FIRST}, NOW() - INTERVAL 1 HOUR, 'Placed', '{{"a":1}}', '{{"user":"u"}}'),
        (1, 1, {SECOND}, NOW() - INTERVAL 1 HOUR, 'Paid', '{{}}', NULL),
        (2, 0, {FIRST}, NOW() - INTERVAL 1 HOUR, 'Placed', '{{}}', NULL)""",
    ),
    {"1": [0, 1], "2": [0]},
    store={"first_version": 0},
    types={("1", 1): "Paid"},
    adds=("ADD INDEX (`created_utc`)",),
)

RAILS = (
    "CREATE TABLE event_store_events (id BIGINT AUTO_INCREMENT PRIMARY KEY, event_id VARCHAR(36) NOT"
    " NULL UNIQUE, event_type VARCHAR(255) NOT NULL, metadata BLOB, data BLOB NOT NULL, created_at"
    " DATETIME(6) NOT NULL, valid_at DATETIME(6) NULL, KEY (event_type), KEY (created_at))",
    "CREATE TABLE event_store_events_in_streams (id BIGINT AUTO_INCREMENT PRIMARY KEY, stream"
    " VARCHAR(255) NOT NULL, position INT NULL, event_id VARCHAR(36) NOT NULL, created_at"
    " DATETIME(6) NOT NULL, KEY (created_at), UNIQUE KEY (stream, position),"
    " UNIQUE KEY (stream, event_id))",
    "INSERT INTO event_store_events (event_id, event_type, data, created_at)"
    " VALUES ('e1', 'Placed', '{}', NOW(6))",
    "INSERT INTO event_store_events_in_streams (stream, position, event_id, created_at)"
    " VALUES ('order-1', NULL, 'e1', NOW(6))",
)
"""Cannot be published: no table of it has version and payload."""

PROOPH_SIMPLE = (
    "CREATE TABLE _a1b2 (no BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, event_id CHAR(36) NOT NULL"
    " UNIQUE, event_name VARCHAR(100) NOT NULL, payload {json} NOT NULL, metadata {json} NOT NULL,"
    " created_at DATETIME(6) NOT NULL) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin",
)
PROOPH_AGGREGATE = (
    "CREATE TABLE _a1b3 (no BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, event_id CHAR(36) NOT NULL"
    " UNIQUE, event_name VARCHAR(100) NOT NULL, payload {json} NOT NULL, metadata {json} NOT NULL,"
    " created_at DATETIME(6) NOT NULL, aggregate_version INT UNSIGNED GENERATED ALWAYS AS"
    " (JSON_EXTRACT(metadata, '$._aggregate_version')) STORED {not_null} UNIQUE KEY)"
    " CHARACTER SET utf8mb3 COLLATE utf8mb3_bin",
)

LAYOUTS = {
    "prooph": PROOPH,
    "patchlevel_aggregate": PATCHLEVEL_AGGREGATE,
    "patchlevel_stream": PATCHLEVEL_STREAM,
    "spatie": SPATIE,
    "axon": AXON,
    "axon_5": AXON_5,
    "akka_jdbc": AKKA_JDBC,
    "pekko_r2dbc": PEKKO_R2DBC,
    "eventsauce": EVENTSAUCE,
    "eventsauce_0": EVENTSAUCE_0,
    "broadway": BROADWAY,
    "broadway_binary": BROADWAY_BINARY,
    "neos": NEOS,
    "pyeventsourcing": PYEVENTSOURCING,
    "neventstore": NEVENTSTORE,
    "sqlstreamstore": SQLSTREAMSTORE,
}
