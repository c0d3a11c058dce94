"""Comparing the store's rows with the topic's records, in SQL on the two tables of `Sides`.

First it is found which aggregates are plainly equal, as mostly all are: as many events, the same
values, each record in its partition and after the versions below it. Only the others are compared
in all ways. What differs is collected in the table `difference`.
"""

# ruff: noqa: S608 (names and conditions are this module's)

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa

from eventpub.ops.sides import Sides
from eventpub.ops.topic import DEAD, DIVERTED, EVENT, FAULTS, GAP, LATE, LEFT_OUT
from eventpub.ops.verdict import SHOWN, Difference, Verdict
from eventpub.terminal import named_versions

MOST_LOOKED_UP = 10_000
"""Events that differ and are looked up once more, at most."""

_AT_ONCE = 10_000
"""Versions with several rows that are worked on together."""

LookUp = Callable[[Sequence[tuple[str, int]]], Collection[tuple[str, int]]]
"""Which of some events are in the store now, whatever their time."""


@dataclass(frozen=True)
class Rules:
    """What counts as a difference.

    Args:
        numbers: of the topic's partitions, those that it had before first.
        clock_changes: when clocks go back, and by how much, µs: a row of the hour before or after
            is read at both of the times that it may be of, and published with one of them.
        held_since: events created at or after, µs, may wait for a version that is not there; None:
            any may.
    """

    numbers: Sequence[int]
    late_policy: str = "publish"
    clock_changes: Collection[tuple[int, int]] = ()
    first_version: int = 1
    held_since: int | None = None


def compare(sides: Sides, verdict: Verdict, rules: Rules, look_up: LookUp) -> None:
    """Compare both sides in the verdict's range, and add what is found to the verdict.

    All differences are in the table `difference` afterwards; see `differences`.

    Args:
        look_up: asks the store for events that it did not have when it was read.
    """
    _Comparison(sides, verdict, rules, look_up).run()


def differences(sides: Sides, kind: str, most: int | None = None) -> Iterator[Difference]:
    """The earliest differences of a kind that the last comparison found; all if `most` is None."""
    limit = "" if most is None else f"LIMIT {most}"
    found = sides.rows(
        'SELECT id, version, create_time, partition, "offset", note FROM difference'
        f" WHERE kind = '{kind}' ORDER BY create_time, id, version {limit}",
    )
    return (Difference(*row) for row in found)


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

_DOUBLED = """
WITH several AS (SELECT id, version FROM s GROUP BY id, version HAVING count(*) > 1)
SELECT id, version, create_time, payload, type, metadata, NULL, rowid AS row
FROM s SEMI JOIN several USING (id, version)
UNION ALL
SELECT id, version, create_time, payload, type, metadata, kind, NULL
FROM t SEMI JOIN several USING (id, version)
ORDER BY id, version, create_time, row
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

_ORDER = """
SELECT * FROM (SELECT *,
    coalesce(version < max(version) OVER (PARTITION BY id ORDER BY epoch, "offset"
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false)
    OR coalesce(version < max(version) OVER (PARTITION BY id, partition ORDER BY "offset"
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS is_behind
FROM in_order) WHERE is_behind
"""

_ABSENT = f"""
CREATE OR REPLACE TABLE absent AS
SELECT id, version, create_time, CASE
    WHEN EXISTS (FROM t WHERE t.id = s.id AND t.version = s.version AND kind = {DEAD}) THEN 'dead'
    WHEN EXISTS (FROM t WHERE t.id = s.id AND t.version = s.version AND kind = {DIVERTED})
        THEN 'diverted'
    WHEN EXISTS (FROM skip WHERE skip.id = s.id AND s.version BETWEEN skip.version AND to_version)
        THEN 'skipped'
    ELSE 'missing' END AS why
FROM s ANTI JOIN record USING (id, version)
"""

_AWAITED = f"""
WITH known AS (
    SELECT id, version FROM s
    UNION SELECT id, CASE kind WHEN {GAP} THEN to_version ELSE version END FROM t
)
SELECT absent.id, absent.version, create_time, known.version, EXISTS (
    FROM skip WHERE skip.id = absent.id
        AND absent.version::HUGEINT - 1 BETWEEN skip.version AND to_version)
FROM absent ASOF LEFT JOIN known ON known.id = absent.id AND known.version < absent.version
WHERE why = 'missing' ORDER BY absent.id, absent.version
"""

_AT = 'id, version, create_time, partition, "offset"'


class _Comparison:
    def __init__(self, sides: Sides, verdict: Verdict, rules: Rules, look_up: LookUp) -> None:
        self._sides, self._verdict = sides, verdict
        self._rules, self._look_up = rules, look_up
        self._backwards = {back for _, back in rules.clock_changes}
        self._range = {"first": verdict.first, "last": verdict.last}

    def run(self) -> None:
        self._run(_SUSPECT, self._range | {"partitions": self._rules.numbers[-1]})
        self._run(_TABLES)
        verdict, accounted = self._verdict, self._verdict.accounted
        [[equal]] = self._run("SELECT count(*) FROM store ANTI JOIN suspect USING (id)")
        self._doubled()
        [[others]] = self._run("SELECT count(*) FROM s")
        self._run(_RECORDS, self._range)
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
            verdict.found(kind, count, list(differences(self._sides, kind, SHOWN)))

    def _run(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        return self._sides.database.execute(sql, values).fetchall()

    def _find(self, kind: str, select: str) -> None:
        self._run(f"INSERT INTO difference SELECT '{kind}', * FROM ({select})")

    def _find_rows(self, kind: str, rows: Sequence[tuple[str, int, int, str]]) -> None:
        """Differences of the store's rows: id, version, `create_time` and note of each."""
        names = ("id", "version", "create_time", "note")
        found = pa.table({name: [row[at] for row in rows] for at, name in enumerate(names)})
        self._insert(f"INSERT INTO difference BY NAME SELECT '{kind}' AS kind, * FROM found", found)

    def _insert(self, sql: str, found: pa.Table) -> None:
        if found.num_rows:
            self._sides.database.register("found", found)
            self._run(sql)
            self._sides.database.unregister("found")

    # --- rows of one version

    def _doubled(self) -> None:
        """Leave one row of each version: the one that is published, or else the first.

        Another one is a dead letter, or a difference.
        """
        versions = groupby(self._sides.rows(_DOUBLED), itemgetter(0, 1))
        while some := [(*key, list(rows)) for key, rows in islice(versions, _AT_ONCE)]:
            found: list[tuple[str, int, int, str]] = []
            removed: list[int] = []
            for aggregate_id, version, of_version in some:
                stored = [row[2:] for row in of_version if row[6] is None]
                records = [row[2:] for row in of_version if row[6] is not None]
                for row, note in self._others(stored, records):
                    removed.append(row[5])
                    if note:
                        found.append((aggregate_id, version, row[0], note))
            self._find_rows("doubled", found)
            self._insert(
                "DELETE FROM s USING found WHERE s.rowid = row", pa.table({"row": removed})
            )

    def _others(
        self, rows: Sequence[tuple[int, ...]], records: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        """Of the rows of one version all but the one that stays, each with what is wrong with it.

        Args:
            rows, records: `create_time`, payload, type, metadata and, of records, the kind.
        """
        letters = [record[:4] for record in records if record[4] == DEAD]
        published = [record[:4] for record in records if record[4] != DEAD]

        def rank(row: tuple[int, ...]) -> tuple[bool, bool]:
            is_letter = any(self._is_letter(letter, row) for letter in letters)
            return row[:4] not in published, not is_letter

        chosen, *others = sorted(rows, key=rank)
        kept = [chosen]
        for row in others:
            alike = [of for of in kept if of[1:4] == row[1:4]]
            if any(abs(row[0] - of[0]) in self._backwards for of in alike):
                yield row, ""  # the same row, read at both of its times
                continue
            kept.append(row)
            letter = next((of for of in letters if self._is_letter(of, row)), None)
            if alike:
                yield row, "the same event is in the table more than once"
            elif letter is None:
                yield row, "the table has other events of this version, too"
            else:
                letters.remove(letter)
                self._verdict.accounted["dead"] += 1
                yield row, ""

    def _is_letter(self, letter: tuple[int, ...], row: tuple[int, ...]) -> bool:
        """Whether a dead letter is that of a row, as far as it says."""
        is_then = abs(letter[0] - row[0]) in {0, *self._backwards}
        content = zip(letter[1:4], row[1:4], strict=True)
        return is_then and all(of_letter in {of_row, LEFT_OUT} for of_letter, of_row in content)

    # --- records

    def _altered(self) -> None:
        columns = ("payload", "type", "create_time", "metadata")
        differs = {name: f"{name} <> row_{name}" for name in columns}
        for change, back in self._rules.clock_changes:
            differs["create_time"] += (
                f" AND NOT (row_create_time BETWEEN {change - back} AND {change + back - 1}"
                f" AND create_time IN (row_create_time - {back}, row_create_time + {back}))"
            )
        places = [f"partition = crc % {number}" for number in self._rules.numbers]
        differs["partition"] = f"NOT ({' OR '.join(places)})"
        differs |= {name: f"faults & {bit} <> 0" for bit, name in FAULTS.items()}
        notes = ", ".join(f"CASE WHEN {sql} THEN '{name}' END" for name, sql in differs.items())
        self._find(
            "altered",
            f"SELECT * FROM (SELECT {_AT}, concat_ws(', ', {notes}) AS note FROM record"
            " WHERE has_row) WHERE note <> ''",
        )

    def _extra(self) -> None:
        """On the topic, not in the store as it was read: it may have been committed since."""
        without_row = f"SELECT {_AT}, 'not in the store' FROM record WHERE nth = 1 AND NOT has_row"
        asked = self._run(f"{without_row} ORDER BY create_time LIMIT {MOST_LOOKED_UP}")
        arrived = list(self._look_up([row[:2] for row in asked]))
        self._verdict.accounted["arrived"] = len(arrived)
        self._find("extra", without_row)
        self._insert(
            "DELETE FROM difference USING found WHERE kind = 'extra'"
            " AND difference.id = found.id AND difference.version = found.version",
            pa.table({"id": [i for i, _ in arrived], "version": [v for _, v in arrived]}),
        )

    def _out_of_order(self) -> None:
        """Per aggregate, by offset: each version above all before it.

        Where partitions were added, what stands in its former partition came before the others. The
        epoch of an event is with which number of partitions it was published, as its place among
        them: that of the first one that explains its partition, and that did not end before a
        lower version of its aggregate was published. (With 4, 6, then 8 partitions an aggregate's
        may be 3, 1, and 3 again.) Where there is no such one, the first that explains it; else
        their number.
        """
        numbers = self._rules.numbers
        unknown = len(numbers)

        def first_from(epoch: str) -> str:
            cases = [
                f"WHEN {at} >= {epoch} AND partition = crc % {number} THEN {at}"
                for at, number in enumerate(numbers)
            ]
            return f"CASE {' '.join(cases)} ELSE {unknown} END"

        self._run(
            f"CREATE OR REPLACE TABLE in_order AS SELECT {_AT}, crc,"
            f" {first_from('0')} AS epoch FROM record WHERE nth = 1 AND kind = {EVENT}"
        )
        for _ in numbers[1:]:  # each time the highest epoch that is reached may rise
            self._run(
                "CREATE OR REPLACE TABLE in_order AS SELECT * EXCLUDE (reached)"
                f" REPLACE (if({first_from('reached')} < {unknown}, {first_from('reached')}, epoch)"
                " AS epoch) FROM (SELECT *, coalesce(max(epoch)"
                f" FILTER (epoch < {unknown}) OVER (PARTITION BY id ORDER BY version), 0)"
                " AS reached FROM in_order)"
            )
        self._find("out_of_order", f"SELECT {_AT}, 'after a later version' FROM ({_ORDER})")

    # --- rows without a record

    def _missing(self) -> None:
        """In the store, not on the topic: unless its absence is recorded."""
        self._run(_ABSENT)
        accounted = self._verdict.accounted
        counts = dict(self._run("SELECT why, count(*) FROM absent GROUP BY why"))
        accounted["dead"] += counts.get("dead", 0)
        accounted["diverted"] = counts.get("diverted", 0)
        no_place = "NULL, NULL"
        if self._rules.late_policy == "drop":
            accounted["dropped"] = counts.get("skipped", 0)
        else:
            self._find(
                "missing",
                f"SELECT id, version, create_time, {no_place}, 'its gap was skipped'"
                " FROM absent WHERE why = 'skipped'",
            )
        held: list[tuple[str, int, int, str]] = []
        if 0 < counts.get("missing", 0) <= MOST_LOOKED_UP:
            held = self._held(self._run(_AWAITED))
            self._find_rows("held", held)
        self._find(
            "missing",
            f"SELECT id, version, create_time, {no_place}, 'not on the topic' FROM absent"
            " WHERE why = 'missing' AND NOT EXISTS (FROM difference WHERE kind = 'held'"
            " AND difference.id = absent.id AND difference.version = absent.version)",
        )

    def _held(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, int, int, str]]:
        """Of missing rows, in order, those for which the publisher waits, with what it awaits.

        Args:
            rows: id, version, `create_time`, the highest known version below it (None: there is
                none), and whether the version before it was skipped.
        """
        rules = self._rules
        asked = [
            (aggregate_id, version - 1)
            for aggregate_id, version, _, below, is_skipped in rows
            if version > rules.first_version and below != version - 1 and not is_skipped
        ]
        lacking = set(asked) - set(self._look_up(asked))
        notes: dict[tuple[str, int], str] = {}
        held = []
        for aggregate_id, version, created, below, _ in rows:
            before = aggregate_id, version - 1
            if rules.held_since is not None and created < rules.held_since:
                continue
            if before in lacking:
                first = version - 1 if below is None else below + 1
                note = f"waits for {named_versions(first, version - 1)}"
            elif before in notes:
                note = notes[before]
            else:
                continue
            notes[aggregate_id, version] = note
            held.append((aggregate_id, version, created, note))
        return held
