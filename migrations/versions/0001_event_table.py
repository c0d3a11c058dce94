"""The event table: created, or what an existing one lacks of it.

Revises: nothing
"""

from alembic import op

from eventpub.sources.mysql.migrating import missing

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Executes the statements as they are: names may hold percent signs and colons."""
    bind = op.get_bind()
    connection = bind.connection.driver_connection
    for statement in missing(op.get_context().opts["store"], connection):
        bind.exec_driver_sql(statement, execution_options={"no_parameters": True})


def downgrade() -> None:
    """Never drops events: whoever wants the table gone drops it by hand."""
