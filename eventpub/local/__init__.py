"""A Kafka broker and a MariaDB on this machine, for the demo, the tutorial and the tests.

They need neither root nor a container engine, download once, and never outlive the process that
started them.
"""
