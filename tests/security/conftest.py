"""Fixtures of the tests of publishers."""

from tests.publisher.conftest import new_publisher, publisher

__all__ = ["new_publisher", "publisher"]
