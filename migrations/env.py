"""Alembic's entry point: `eventpub migrate` hands it the connection and the `[store]` section.

There is no alembic.ini: which table is meant, and under which names, stands in eventpub.toml.
"""

from alembic import context

attributes = context.config.attributes
if "connection" not in attributes or context.is_offline_mode():
    raise SystemExit("run: eventpub migrate (or eventpub migrate --sql)")

context.configure(
    connection=attributes["connection"],
    version_table=attributes["version_table"],
    store=attributes["store"],
)
with context.begin_transaction():
    context.run_migrations()
