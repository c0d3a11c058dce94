"""Compares the store's rows with the topic's records, in SQL on the two tables of `Sides`.

Aggregates with equal hashes, usually almost all, are excluded first; only the others are compared
in detail. Differences go to the table `difference`.
"""

# ruff: noqa: S608 (names and conditions are this module's)

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eventpub.errors import named_versions
from eventpub.ops.sides import SHOWN, Sides, Verdict
from eventpub.ops.topic import DEAD, DIVERTED, EVENT, FAULTS, FOREIGN, GAP, LATE, LEFT_OUT, NO_TIME

MOST_LOOKED_UP = 10_000
"""Most differing events that are looked up again in the store."""
_MOST_HELD = 200_000
"""Most missing events of which the held ones are found; they are compared in memory."""


_HASH = "hash(version, create_time, payload, type, metadata)::HUGEINT"

_SUSPECT = f"""
CREATE OR REPLACE TABLE suspect AS
SELECT id FROM (
    SELECT id, {_HASH} AS content, 1 AS events, false AS is_odd FROM store
    UNION ALL
    SELECT id, -{_HASH}, -1, kind <> {EVENT} OR faults <> 0 OR partition <> crc % $partitions
    FROM topic WHERE create_time BETWEEN $first AND $last OR kind <> {EVENT}
) GROUP BY id HAVING sum(content) <> 0 OR sum(events) <> 0 OR bool_or(is_odd)
UNION
SELECT id FROM (
    SELECT id, version <= lag(version) OVER (PARTITION BY id ORDER BY "offset") AS is_behind
    FROM topic WHERE create_time BETWEEN $first AND $last
) WHERE is_behind
UNION
SELECT id FROM topic SEMI JOIN store USING (id, version)
WHERE create_time NOT BETWEEN $first AND $last
"""

_TABLES = f"""
CREATE OR REPLACE TABLE s AS SELECT * FROM store SEMI JOIN suspect USING (id);
CREATE OR REPLACE TABLE t AS SELECT * FROM topic SEMI JOIN suspect USING (id);
CREATE OR REPLACE TABLE skip AS SELECT id, version, to_version FROM t WHERE kind = {GAP};
CREATE OR REPLACE TABLE difference (
    kind VARCHAR, id VARCHAR, version BIGINT, create_time BIGINT,
    partition INTEGER, "offset" BIGINT, note VARCHAR
)
"""

_DOUBLED = f"""
CREATE OR REPLACE TABLE several AS
SELECT id, version FROM s GROUP BY id, version HAVING count(*) > 1;
CREATE OR REPLACE TABLE known AS FROM t SEMI JOIN several USING (id, version);
CREATE OR REPLACE TABLE one AS
SELECT id, version, create_time, hash(payload, type, metadata) AS content, rowid AS row,
    EXISTS (FROM known k WHERE k.id = s.id AND k.version = s.version AND kind <> {DEAD}
        AND k.create_time = s.create_time AND k.payload = s.payload AND k.type = s.type
        AND k.metadata = s.metadata) AS is_published,
    EXISTS (FROM known k WHERE k.id = s.id AND k.version = s.version AND kind = {DEAD}
        AND list_contains($backs, abs(k.create_time::HUGEINT - s.create_time))
        AND k.payload IN (s.payload, {LEFT_OUT}) AND k.type IN (s.type, {LEFT_OUT})
        AND k.metadata IN (s.metadata, {LEFT_OUT})) AS is_dead
FROM s SEMI JOIN several USING (id, version);
CREATE OR REPLACE TABLE one AS SELECT *, row_number() OVER (
    PARTITION BY id, version ORDER BY is_published DESC, is_dead DESC, create_time, row) AS nth
FROM one;
CREATE OR REPLACE TABLE other AS
SELECT * EXCLUDE (is_alike, later), CASE
    WHEN is_alike AND later <> 0 AND list_contains($backs, abs(later)) THEN ''
    WHEN is_alike THEN 'the same event is in the table more than once'
    WHEN is_dead THEN 'dead'
    ELSE 'the table has other events of this version, too' END AS note
FROM (
    SELECT *, row_number() OVER alike > 1 AS is_alike,
        create_time - first_value(create_time) OVER alike AS later
    FROM one WINDOW alike AS (PARTITION BY id, version, content ORDER BY nth)
) WHERE nth > 1;
DELETE FROM s WHERE rowid IN (SELECT row FROM other)
"""

_RECORDS = f"""
CREATE OR REPLACE TABLE record AS
SELECT t.*, s.version IS NOT NULL AS has_row,
    row_number() OVER (PARTITION BY t.id, t.version ORDER BY t."offset", t.partition) AS nth,
    s.payload AS row_payload, s.type AS row_type, s.metadata AS row_metadata,
    s.create_time AS row_create_time
FROM t LEFT JOIN s ON t.id = s.id AND t.version = s.version
WHERE t.kind IN ({EVENT}, {LATE})
    AND (s.version IS NOT NULL OR t.create_time BETWEEN $first AND $last)
"""

_ORDER = f"""
SELECT *, coalesce(version < max(version) OVER (PARTITION BY id, partition ORDER BY "offset"
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false)
    OR epoch IS NOT NULL AND coalesce(version < max(version) OVER (
        PARTITION BY id, epoch IS NULL ORDER BY epoch, "offset"
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS is_behind
FROM (SELECT *, {{epoch}} AS epoch FROM record WHERE nth = 1 AND kind = {EVENT})
"""

_ABSENT = f"""
CREATE OR REPLACE TABLE absent AS
SELECT id, version, create_time, CASE
    WHEN EXISTS (FROM t WHERE t.id = s.id AND t.version = s.version AND kind = {DEAD}) THEN 'dead'
    WHEN EXISTS (FROM t WHERE t.id = s.id AND t.version = s.version AND kind = {DIVERTED})
        THEN 'diverted'
    WHEN EXISTS (FROM skip WHERE skip.id = s.id AND s.version BETWEEN skip.version AND to_version)
        THEN $skipped
    ELSE 'missing' END AS why
FROM s ANTI JOIN record USING (id, version)
"""

_AWAITED = f"""
WITH known AS (
    SELECT id, version FROM s
    UNION SELECT id, CASE kind WHEN {GAP} THEN to_version ELSE version END FROM t
    WHERE kind <> {FOREIGN}
)
SELECT absent.id, absent.version, create_time, known.version
FROM absent ASOF LEFT JOIN known ON known.id = absent.id AND known.version < absent.version
WHERE why = 'missing' ORDER BY absent.id, absent.version
"""

_AT = 'id, version, create_time, partition, "offset"'


@dataclass
class Comparison:
    """Compares both sides; what counts as a difference.

    Args:
        numbers: of the topic's partitions, earlier numbers first.
        look_up: returns those of some events that are in the store now, whatever their time.
        clock_changes: when clocks go back, and by how much, µs. Rows of the hour before or after
            are read at both possible times, and published with one of them.
        held: the first missing version of those of some aggregates that the publisher holds; None:
            unknown, so that events created at or after `held_since`, µs, may wait for one.
    """

    sides: Sides
    numbers: Sequence[int]
    look_up: Callable[[Sequence[tuple[str, int]]], Collection[tuple[str, int]]]
    late_policy: str = "publish"
    clock_changes: Collection[tuple[int, int]] = ()
    first_version: int = 1
    held_since: int = 0
    held: Callable[[Collection[str]], Mapping[str, int] | None] = lambda _: None

    def run(self) -> None:
        """Compare what the sides have now; the result is `verdict`."""
        verdict = self.verdict = Verdict(self.sides.after + 1, self.sides.upto)
        accounted, within = verdict.accounted, {"first": verdict.first, "last": verdict.last}
        self._run(_SUSPECT, within | {"partitions": self.numbers[-1]})
        self._run(_TABLES)
        [[equal]] = self._run("SELECT count(*) FROM store ANTI JOIN suspect USING (id)")
        self._doubled()
        [[others]] = self._run("SELECT count(*) FROM s")
        self._run(_RECORDS, within)
        [[records, late]] = self._run(
            f"SELECT count(*), count(*) FILTER (nth = 1 AND kind = {LATE}) FROM record"
        )
        verdict.events, verdict.records = equal + others, equal + records
        [[verdict.skips]] = self._run("SELECT count(*) FROM skip")
        accounted["late"] = late
        self._find("repeated", f"SELECT {_AT}, 'published again' FROM record WHERE nth > 1")
        self._altered()
        self._extra()
        self._out_of_order()
        self._missing()
        for kind, count in self._run("SELECT kind, count(*) FROM difference GROUP BY kind"):
            verdict.counts[kind] = count
            verdict.examples[kind] = list(self.sides.differences(kind, SHOWN))

    @property
    def _fits(self) -> list[str]:
        return [f"partition = crc % {number}" for number in self.numbers]

    def _run(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return self.sides.database.execute(sql, values).fetchall()

    def _find(self, kind: str, select: str) -> None:
        self._run(f"INSERT INTO difference SELECT '{kind}', * FROM ({select})")

    def _run_with(self, rows: Sequence[Sequence[Any]], names: str, sql: str) -> None:
        """Execute a statement on the table `found` of these rows, unless there are none."""
        if rows:
            columns = zip(*rows, strict=True)
            found = pa.table(dict(zip(names.split(), map(list, columns), strict=True)))
            self.sides.database.register("found", found)
            self._run(sql)
            self.sides.database.unregister("found")

    def _doubled(self) -> None:
        """Keep one row of each version; others are dead letters or differences."""
        backs = [0, *(back for _, back in self.clock_changes)]
        self._run(_DOUBLED.replace("$backs", str(backs)))
        [[dead]] = self._run("SELECT count(*) FROM other WHERE note = 'dead'")
        self.verdict.accounted["dead"] += dead
        self._find(
            "doubled",
            "SELECT id, version, create_time, NULL, NULL, note FROM other"
            " WHERE note NOT IN ('', 'dead')",
        )

    def _altered(self) -> None:
        columns = ("payload", "type", "create_time", "metadata")
        differs = {name: f"{name} <> row_{name}" for name in columns}
        for change, back in self.clock_changes:
            differs["create_time"] += (
                f" AND NOT (row_create_time BETWEEN {change - back} AND {change + back - 1}"
                f" AND create_time IN (row_create_time - {back}, row_create_time + {back}))"
            )
        differs["partition"] = f"NOT ({' OR '.join(self._fits)})"
        differs |= {name: f"faults & {bit} <> 0" for bit, name in FAULTS.items()}
        notes = ", ".join(f"CASE WHEN {sql} THEN '{name}' END" for name, sql in differs.items())
        self._find(
            "altered",
            f"SELECT * FROM (SELECT {_AT}, concat_ws(', ', {notes}) AS note FROM record"
            " WHERE has_row) WHERE note <> ''",
        )

    def _extra(self) -> None:
        without_row = f"SELECT {_AT}, 'not in the store' FROM record WHERE nth = 1 AND NOT has_row"
        asked = self._run(f"{without_row} ORDER BY create_time LIMIT {MOST_LOOKED_UP}")
        arrived = list(self.look_up([row[:2] for row in asked]))
        self.verdict.accounted["arrived"] = len(arrived)
        self._find("extra", without_row)
        self._run_with(
            arrived,
            "id version",
            "DELETE FROM difference USING found WHERE kind = 'extra'"
            " AND difference.id = found.id AND difference.version = found.version",
        )
        self._find(
            "extra",
            f'SELECT id, NULL, {NO_TIME}, partition, "offset", note FROM t WHERE kind = {FOREIGN}',
        )

    def _out_of_order(self) -> None:
        """Versions after a higher one of their aggregate.

        Offsets order the records of a partition. Where partitions were added, a record whose
        partition fits only one of their numbers comes after the records of earlier numbers.
        """
        fits = self._fits
        fitting = " + ".join(f"({fit})::INT" for fit in fits)
        epoch = f"CASE WHEN {fitting} = 1 THEN list_position([{', '.join(fits)}], true) END"
        behind = f"({_ORDER.format(epoch=epoch)}) WHERE is_behind"
        self._find("out_of_order", f"SELECT {_AT}, 'after a later version' FROM {behind}")

    def _missing(self) -> None:
        is_dropped = self.late_policy == "drop"
        self._run(_ABSENT, {"skipped": "dropped" if is_dropped else "skipped"})
        counts = dict(self._run("SELECT why, count(*) FROM absent GROUP BY why"))
        for why in ("dead", "diverted", "dropped"):
            self.verdict.accounted[why] += counts.get(why, 0)
        if counts.get("missing", 0) > _MOST_HELD:
            text = f"more than {_MOST_HELD:,} events are missing; some may only be held"
            self.verdict.notes.append(text)
        elif "missing" in counts:
            self._run_with(
                self._held(self._run(_AWAITED)),
                "id version create_time note",
                "INSERT INTO difference BY NAME SELECT 'held' AS kind, * FROM found",
            )
        self._find(
            "missing",
            "SELECT id, version, create_time, NULL, NULL,"
            " if(why = 'skipped', 'its gap was skipped', 'not on the topic')"
            " FROM absent ANTI JOIN (FROM difference WHERE kind = 'held') USING (id, version)"
            " WHERE why IN ('missing', 'skipped')",
        )

    def _held(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, int, int, str]]:
        """The missing rows, in order, that the publisher holds, and the versions they wait for.

        `rows` are id, version, `create_time`, and the highest known lower version or None.
        """
        asked = [
            (aggregate_id, version - 1)
            for aggregate_id, version, _, below in rows
            if version > self.first_version and below != version - 1
        ]
        lacking = set(asked) - set(self.look_up(asked))
        known = self.held({aggregate_id for aggregate_id, _ in lacking}) if lacking else {}
        held, waiting, previous, note = [], None, None, ""
        for aggregate_id, version, created, below in rows:
            if (aggregate_id, version - 1) in lacking:
                first = version - 1 if below is None else below + 1
                waiting, note = aggregate_id, f"waits for {named_versions(first, version - 1)}"
            elif version - 1 != previous:  # which does not wait
                waiting = None
            if known is None:
                is_held = created >= self.held_since
            else:
                is_held = version > known.get(aggregate_id, version)
            waiting = waiting if is_held else None
            if aggregate_id == waiting:
                held.append((aggregate_id, version, created, note))
            previous = version
        return held
