# The publisher: Python, Java 17 for Spark, and eventpub. Configuration by EVENTPUB_… variables or a
# mounted /var/lib/eventpub/eventpub.toml; the state is in /var/lib/eventpub/state: keep the volume.
FROM python:3.12-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends openjdk-17-jre-headless procps \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /usr/src/eventpub
COPY pyproject.toml README.md LICENSE ./
COPY migrations migrations
COPY eventpub eventpub
RUN pip install --no-cache-dir . && rm -rf /usr/src/eventpub

RUN useradd --system --uid 10001 --home-dir /var/lib/eventpub --create-home eventpub
USER eventpub
WORKDIR /var/lib/eventpub
RUN mkdir --mode=700 state
VOLUME /var/lib/eventpub/state
ENV PYTHONUNBUFFERED=1

# Whether the publisher answers and does not hang, at the port of ops.http. One that waits for a
# database or broker that is away is healthy: it goes on by itself.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=2 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8077/healthz')"]

# SIGTERM finishes the transactions in work, within two seconds
STOPSIGNAL SIGTERM
ENTRYPOINT ["eventpub"]
CMD ["run"]
