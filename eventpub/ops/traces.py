"""Transactions of shards as OpenTelemetry spans, made of the reports that the coordinator gets.

Off unless `ops.traces`; where spans go is said by the standard variables (``OTEL_EXPORTER_OTLP_…``,
``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_…``). A collector that is away costs
spans and nothing else: a thread sends them, so many wait at most, and the log counts those lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import structlog

from eventpub import __version__
from eventpub.channel import Farewell, FromRunner, Report
from eventpub.channel.lane import Received
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard
from eventpub.errors import ConfigError, EventpubError
from eventpub.masking import mask_url, remember

_MOST_WAITING = 2_048
"""Spans that are made and not sent yet; one more is dropped."""

_SAID_EVERY = 60.0
_ENDS_WITHIN = 1.0
"""Seconds for the last spans to be sent when the publisher stops."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_DEFAULT = "http://localhost:4318"
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.traces")


class _Reason(logging.Handler):
    """Keeps what the exporter says last, instead of a line for each attempt."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Traces:
    """See the module. Used by one thread; neither waits nor raises once it is made.

    Args:
        config: the whole configuration.

    Raises:
        ConfigError: config.extra_missing, config.traces
    """

    def __init__(self, config: Config) -> None:
        for name in _HEADERS:
            for header in os.environ.get(name, "").split(","):
                remember(header.partition("=")[2].strip())
        try:
            self._provider, self._exporter = _provider(config)
        except ImportError as error:
            raise ConfigError(
                "config.extra_missing",
                f"ops.traces needs {error.name}, which the extra 'traces' installs",
                where="ops.traces",
                suggestion="install eventpub with its extra 'traces' (in a clone:"
                " pip install '.[traces]'), or set ops.traces = false",
            ) from error
        except Exception as error:
            raise ConfigError(
                "config.traces",
                f"OpenTelemetry does not start: {mask_url(str(error))}",
                where="ops.traces",
                suggestion="check the environment variables OTEL_…",
            ) from error
        self._reason = _Reason()
        of_sdk = logging.getLogger("opentelemetry")
        of_sdk.handlers[:], of_sdk.propagate = [self._reason], False
        self._tracer = self._provider.get_tracer("eventpub", __version__)
        self._made = self._dropped = self._said = 0
        self._said_at = float("-inf")

    def observe(self, event: e.Event, shards: Sequence[Shard], now: float) -> None:
        """Make a span of an event that reports a transaction, or an error, of who has a lease.

        Args:
            shards: as they stand before the event is handled.
            now: the machine's time, s.
        """
        try:
            if isinstance(event, Received) and 0 <= event.lane.shard < len(shards):
                shard, message = shards[event.lane.shard], event.message
                if shard.lane is event.lane:
                    self._reported(shard, event.lane.hello.where, message)
            elif isinstance(event, e.RunnerEnded) and event.error is not None:
                self._span(shards[event.shard], "", event.error)
            self._say(now)
        except Exception as error:  # of a sampler of the user's own
            log.warning("a span was not made", error=mask_url(f"{type(error).__name__}: {error}"))

    def _reported(self, shard: Shard, where: str, message: FromRunner) -> None:
        if isinstance(message, Report) and (message.published or message.counts.rows):
            steps = {step: took for step, took in message.seconds.items() if step != "read"}
            facts: dict[str, Any] = {f"seconds.{step}": took for step, took in steps.items()}
            facts |= {"rows": message.counts.rows, "published": message.published}
            self._span(shard, where, None, sum(steps.values()), **facts)
        elif isinstance(message, Farewell) and message.error is not None:
            self._span(shard, where, message.error)

    def _say(self, now: float) -> None:
        lost = self._dropped + self._exporter.failed
        if lost > self._said and now - self._said_at >= _SAID_EVERY:
            log.warning(
                "spans are lost: the collector does not take them",
                spans=lost - self._said,
                since_the_start=lost,
                collector=mask_url(next(filter(None, map(os.environ.get, _ENDPOINTS)), _DEFAULT)),
                error=mask_url(self._reason.text),
            )
            self._said, self._said_at = lost, now

    def _span(
        self,
        shard: Shard,
        where: str,
        error: EventpubError | None,
        seconds: float = 0.0,
        **facts: float,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if self._made - self._exporter.handled >= _MOST_WAITING:
            self._dropped += 1
            return
        given: dict[str, Any] = {"shard": shard.number, "lease": shard.lease, "where": where}
        end = time.time_ns()
        span = self._tracer.start_span(
            "publish",
            kind=SpanKind.PRODUCER,
            attributes={f"eventpub.{name}": value for name, value in (given | facts).items()},
            start_time=end - round(seconds * 1e9),
        )
        if error is not None:
            span.set_attribute("error.type", error.code)
            span.set_status(Status(StatusCode.ERROR, mask_url(f"{error.code}: {error.message}")))
        self._made += span.get_span_context().trace_flags.sampled
        span.end(end)

    def end(self) -> None:
        """Send what waits, for a moment at most."""
        ends = threading.Thread(target=self._provider.shutdown, name="eventpub-traces", daemon=True)
        ends.start()
        ends.join(_ENDS_WITHIN)


class _Counted:
    """An exporter of spans with counts, which are written by the thread that sends."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.handled = self.failed = 0

    def export(self, spans: Sequence[Any]) -> Any:
        is_taken = False
        try:
            result = self._inner.export(spans)
            is_taken = result.name == "SUCCESS"
            return result
        finally:
            self.failed += 0 if is_taken else len(spans)
            self.handled += len(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()


def _provider(config: Config) -> tuple[Any, _Counted]:
    """OpenTelemetry's, as its variables say, and its exporter."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = _Counted(OTLPSpanExporter())
    resource = Resource.create({"eventpub.app": config.app.id, "eventpub.topic": config.sink.topic})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "eventpub"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor: Any = BatchSpanProcessor
    provider.add_span_processor(processor(exporter, max_queue_size=_MOST_WAITING))
    return provider, exporter
