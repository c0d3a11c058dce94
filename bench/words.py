"""What each case measures and what its words mean, for the page and for readers of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class About:
    """Of one case.

    Attributes:
        heading: the title of its section, also in docs/measured.md.
        text: what is done and what is counted.
        terms: words of its tables and plots, with what they mean.
    """

    heading: str
    text: str
    terms: Mapping[str, str] = field(default_factory=dict)


_MAIN = "the process of `eventpub run`; without Spark it is the only one"
_DELAYS = {
    "delay 1s, watermark off": "rows are read at an age of 1 s: what eventpub does without the "
    "privilege PROCESS",
    "delay 50ms, watermark": "rows are read at an age of 50 ms, but not past an open transaction "
    "(watermark; for at most `read.max_wait`, 1 s). Needs PROCESS",
}
_LATENCY = {
    "p50, p99, max": "of 100 events 50, or 99, took at most so long; and the slowest of all",
}

ABOUT: dict[str, About] = {
    "article": About(
        "Late commits: what a poller loses",
        "Writers insert events at two rates, and a part of their transactions stays open for some "
        "seconds before it commits. Rows of such a transaction become visible after newer rows, so "
        "that a reader which moves forward by time has passed them. Counted is what never "
        "reaches the topic. (The case is called article after an article whose load it repeats.)",
        {
            "timestamp poller": "the usual one: every 100 ms it selects the rows with a "
            "create_time after the newest that it has seen",
            "window only": "eventpub with its three means against late commits switched off: it "
            "reads each row at an age of 1 s, once",
            "with backtrack": "and a version that is missing below a later one of its aggregate is "
            "looked up by its key",
            "with recount and watermark": "eventpub as it is by default. Recount: the rows of each "
            "second are counted again 2 s, 4 s, 8 s … up to 5 minutes later, and what is new is "
            "published. Watermark: nothing is read past an open transaction, for at most 1 s "
            "(`read.max_wait`)",
            **_LATENCY,
        },
    ),
    "drain": About(
        "Draining a backlog",
        "A table is full of events of which none is published. Measured is how fast each program "
        "empties it onto a topic, exactly once. They run in turns, on the same rows, database and "
        "broker.",
        {
            "drain": "to publish all that waits, and then to end",
            "raw pipe": "reads pages with ConnectorX and produces them in transactions, without "
            "any of the checks: the most that this machine and these clients could do",
            "Debezium": "Debezium's MySQL connector on Kafka Connect, exactly once; it reads the "
            "binary log of the same rows",
            "from start": "eventpub and the raw pipe from the start of their process; Debezium "
            "from its connector's start on a Connect worker that already runs (in its favour)",
            "main process": _MAIN,
        },
    ),
    "growth": About(
        "Backlogs by size of the table, aggregates, shards and page size",
        "Drains as above, of tables of several sizes and with several settings. The question is "
        "whether anything becomes slower as the table grows.",
        {
            "the last tenth": "the rate of the last 10% of the events: it would be low if a drain "
            "slowed down on its way",
            "more": "so many new events are added to the drained table, and a publisher with the "
            "state of the first drain publishes them",
            "page": "the rows that are read at once (`read.page_rows`); its time is its number of "
            "rows divided by the rate",
            "shards": "parts into which the aggregates are split, published in parallel",
            "index": "what the publisher remembers on its disk: the last version of each aggregate",
        },
    ),
    "idle": About(
        "Idle",
        "A publisher that has nothing to publish: what it costs to poll, with Spark's local tasks "
        "(for a publisher without Spark see sizing).",
        {**_DELAYS, "main process": "the process of `eventpub run`"},
    ),
    "latency": About(
        "Latency",
        "Writers insert at a steady rate, and each transaction commits at once. Latency is from "
        "create_time, which the database sets when the insert begins, until a consumer with "
        "isolation.level=read_committed has the event. Database and consumer share one clock.",
        {**_DELAYS, **_LATENCY},
    ),
    "bursts": About(
        "Bursts and hot keys",
        "Loads that are not even: ten times the rate for some seconds; a few aggregates that get "
        "most of the events; and a backlog that belongs to a single aggregate.",
        {
            "zipf 1.2": "aggregates are chosen by Zipf's law with the exponent 1.2: the second "
            "most popular gets 0.44 of the events of the first, the tenth 0.06",
            **_LATENCY,
        },
    ),
    "restart": About(
        "After a kill",
        "All processes of the publisher are killed with kill -9 under load, and it is started "
        "again at once.",
        {
            "first new event": "from the kill until a consumer has an event that was created after "
            "it",
            "caught up": "from the kill until all that arrives is as young as before it",
        },
    ),
    "large": About(
        "Large transactions",
        "Transactions of thousands of rows, some of them held open. Latency is from the moment in "
        "which the writer has the answer to its COMMIT: before it nobody can see the rows.",
        {
            **_DELAYS,
            "since create_time": "as in Latency; most of it is the time that the writer's "
            "transaction took",
            **_LATENCY,
        },
    ),
    "sizing": About(
        "How large a machine",
        "What the publisher needs of CPU, memory and disk: idle, at steady rates, and with a "
        "backlog. Once without Spark, which is what eventpub init writes for one machine, and once "
        "with Spark's local tasks. All other settings are the defaults.",
        {
            'run.engine = "threads"': "no Spark and no Java: the shards are threads of one process",
            'run.engine = "spark"': "Structured Streaming on this machine",
            "CPU s per 1,000 events": "of all the publisher's processes, after a warm-up",
            "memory, RSS": "memory: the highest sum over the publisher's processes, pages that are "
            "shared count in part (PSS). RSS: such pages count in full, for each process: what a "
            "single process needs on a machine of its own",
            "on the topic": "the segments of the topic on the broker's disk: one replica, lz4",
            **_LATENCY,
        },
    ),
}

PROCESSES = {
    "driver": "main process",
    "jvm": "Spark's JVM",
    "workers": "Spark's Python workers",
    "connect": "Kafka Connect worker",
}
"""What the groups of processes in the results are called in tables and plots."""
