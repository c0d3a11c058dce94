"""What `eventpub doctor` says of keys, versions and times: of the table's rows, and what it allows.

Each statement that is printed was made for the table as it is (`eventpub.sources.mysql.fixes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eventpub.config import Store
from eventpub.errors import Check
from eventpub.sources.mysql import fixes, statements
from eventpub.sources.mysql.connection import Connection, is_mariadb, run
from eventpub.sources.mysql.identity import IdPart, literal
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.server import Versions
from eventpub.sources.mysql.table import EventTable, Roles, quote
from eventpub.terminal import counted

FEW_ROWS = 1_000
_SOME_KEYS = 5_000
_NEWEST = 100_000
"""Rows of which it is said how many have no identity."""


@dataclass(frozen=True)
class Subject:
    """A table that can be read, as the checks need it."""

    config: Store
    layout: Layout
    table: EventTable
    roles: Roles

    @property
    def connection(self) -> Connection:
        """For statements about the rows."""
        return self.table.connection


def row_checks(subject: Subject) -> Iterator[Check]:
    """The checks of a table that can be read."""
    yield _identity(subject)
    yield _nulls(subject)
    sample = run(subject.connection, statements.some_keys(subject.layout, _SOME_KEYS))
    versions = Versions(sample)
    yield _versions(subject, versions)
    yield _first_versions(subject.config.first_version, versions.lowest)
    yield _create_time(subject)
    if subject.layout.zone is not None:
        yield _number(subject)


def _identity(subject: Subject) -> Check:
    name = "event store: identity of aggregates"
    parts = subject.layout.identity.parts
    collations = ", ".join(dict.fromkeys(part.collation for part in parts))
    if not subject.layout.key_is_unique:
        return Check(name, "warn", *_not_unique(subject))
    for part in parts:
        equal = [] if part.is_bytewise else _taken_for_equal(subject.connection, part)
        if part.is_bytewise or (not equal and part.collation.endswith("_bin")):
            continue
        *others, last = [what for what, _ in equal] or ["characters that it ignores"]
        differences = f"{', '.join(others)} or {last}" if others else last
        other = next((repr(id_) for _, id_ in equal), None)
        column = part.name.strip("`")
        bytewise = "nopad_bin" if is_mariadb(subject.connection) else "0900_bin"
        refused = f"{column} 'a' beside {other}" if other else f"the second {column} of the two"
        return Check(
            name,
            "warn",
            f"collation {part.collation} takes ids for equal that differ only in {differences}, "
            f"so the database refuses {refused}; "
            "eventpub publishes each row under its exact bytes, as an aggregate of its own",
            f"give the column the collation utf8mb4_{bytewise}, or let writers use one spelling",
        )
    return Check(name, "ok", f"by bytes ({collations}), versions unique")


def _not_unique(subject: Subject) -> tuple[str, str]:
    """What is said of a table that takes a version of an aggregate twice, and what changes that."""
    table, roles = subject.table, subject.roles
    said = (
        "the table allows one version of an aggregate twice; a second row that differs becomes a"
        " dead letter"
    )
    wider = fixes.identity(table, roles)
    if wider != roles.parts:
        others = " and ".join(name for name in wider if name not in roles.parts)
        return (
            f"{said}; here rows of one {', '.join(roles.parts)} and version belong to aggregates"
            f" that {others} tells apart",
            fixes.set_identity(wider),
        )
    added, why = fixes.key_index(table, roles.key)
    if not why:
        return said, table.alter([added])
    said += f"; no unique key is possible: {why}"
    if table.repeated(roles.key):
        return said, (
            "look at these rows, and see which belongs to another aggregate or version: "
            + statements.repeated(subject.layout)
        )
    return said, "have the writers of the table see to it that a version is written once"


_SPELLINGS = (("case", "A"), ("accents", "á"), ("trailing blanks", "a "))
"""What else an id may look like that some collation takes for `a`."""


def _taken_for_equal(connection: Connection, part: IdPart) -> list[tuple[str, str]]:
    """Those of `_SPELLINGS` that the column's collation takes for `a`, as the server says."""

    def as_stored(text: str) -> str:
        return f"CONVERT({literal(text)} USING {part.charset})"

    first = f"{as_stored('a')} COLLATE {part.collation}"
    compared = ", ".join(f"{first} = {as_stored(spelling)}" for _, spelling in _SPELLINGS)
    answers = run(connection, f"SELECT {compared}")[0]
    return [entry for entry, is_equal in zip(_SPELLINGS, answers, strict=True) if is_equal]


def _nulls(subject: Subject) -> Check:
    name = "event store: rows without identity or time"
    connection, layout, table = subject.connection, subject.layout, subject.table
    time = subject.roles.names["create_time"]
    never_read = int(run(connection, statements.without_time(layout, FEW_ROWS))[0][0])
    if never_read:
        said = counted(never_read, "row has", "rows have")
        if never_read == FEW_ROWS:
            said = f"{never_read} or more rows have"
        return Check(
            name,
            "warn",
            f"{said} no create_time, a zero date, or one before 1970: never published; and the"
            " publisher stops where a later version of the same aggregate follows one without a"
            " time",
            f"give {time} of these rows a time of now, and make it NOT NULL",
        )
    allowed = [name for name in (*subject.roles.key, time) if table.columns[name].nullable]
    if not allowed:
        return Check(name, "ok", "none")
    nameless = int(run(connection, statements.without_identity(layout, _NEWEST))[0][0])
    rows = f"{counted(nameless, 'row')} of the newest {_NEWEST:,} without aggregate_id or version"
    if layout.skips_nulls:
        return Check(name, "ok", f"{rows}; store.without_identity passes them over")
    said, ways = f"{', '.join(allowed)} may be NULL: a row without create_time is never read", []
    # a generated column is what its expression is
    if not nameless and not any(table.columns[column].generated_as for column in allowed):
        ways.append(fixes.not_null(table, allowed))
    if allowed != [time]:
        said += f", one without aggregate_id or version stops the publisher ({rows})"
        ways.append('set store.without_identity = "skip" where such rows are no events of any')
    return Check(name, "warn", said, "; or ".join(ways) or f"make {time} NOT NULL")


def _versions(subject: Subject, found: Versions) -> Check:
    name = "event store: versions"
    version = subject.roles.names["version"]
    if subject.table.columns[version].counts_rows or found.count_all_rows:
        return Check(
            name,
            "wrong",
            f"{version} numbers the rows of the table, not the events of an aggregate: each event"
            " would wait for versions that never come, until they are skipped",
            "map a column that goes up by one within the aggregate: version in [store.columns];"
            " a table without one cannot be published",
        )
    if found.with_holes * 2 > found.with_several:
        return Check(
            name,
            "warn",
            f"{found.with_holes} of {counted(found.with_several, 'aggregate')} with several events"
            " lack versions in between: each waits until its gap is skipped (gaps.max_backoff)",
            f"see whether {version} goes up by one within an aggregate in every writer",
        )
    return Check(name, "ok", "they follow each other within an aggregate")


def _first_versions(first: int, lowest: Sequence[int]) -> Check:
    name = "event store: first versions"
    above, below = (sum(v > first for v in lowest), sum(v < first for v in lowest))
    if below:
        return Check(
            name,
            "wrong" if below * 2 > len(lowest) else "warn",
            f"{below} of {len(lowest)} aggregates begin below version {first}: these events become"
            " dead letters",
            "set store.first_version = 0",
        )
    if above * 2 <= len(lowest):
        return Check(name, "ok", f"aggregates begin with version {first}")
    return Check(
        name,
        "warn",
        f"{above} of {len(lowest)} aggregates begin above version {first}: each waits for what is"
        " below until its gap is skipped (gaps.max_backoff), unless that is before read.start",
        "set store.first_version = 1"
        if first == 0 and lowest.count(1) * 2 > above
        else "set store.first_version to what they begin with; where the first events were "
        "archived, set read.start to a time after that",
    )


def _create_time(subject: Subject) -> Check:
    name = "event store: create_time"
    column = subject.table.columns[subject.roles.names["create_time"]]
    fix = None if column.generated_as else fixes.not_null(subject.table, [column.name])
    if "on update" in column.extra:
        return Check(
            name,
            "warn",
            "ON UPDATE CURRENT_TIMESTAMP: an updated row is read again at its new time",
            fix,
        )
    if not column.default.startswith("current_timestamp"):
        return Check(
            name,
            "warn",
            "not set by the database: an event whose writer's clock is behind by more than "
            "read.delay is found late, by a gap or a recount (a default helps where writers leave"
            " the column out)",
            fix,
        )
    return Check(name, "ok", f"{column.full_type}, set by the database")


def _number(subject: Subject) -> Check:
    name = "event store: order of insertion"
    if subject.layout.id_index is not None:
        return Check(name, "ok", f"by {(subject.layout.id or '').strip('`')}")
    number = quote(subject.table.free("seq"))
    return Check(
        name,
        "warn",
        "rows inserted with an old create_time are not noticed, since the table has no indexed"
        " column of ascending numbers",
        subject.table.alter(
            [f"ADD COLUMN {number} BIGINT NOT NULL AUTO_INCREMENT", f"ADD INDEX ({number})"]
        ),
    )
