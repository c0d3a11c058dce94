"""The user's own function that returns OAUTHBEARER tokens for Kafka's clients.

`sink.token_provider` names it as ``package.module:function``. It is called with the property
`sasl.oauthbearer.config` ("" if unset), by several threads and in every process of the publisher,
and returns ``(token, expires)``, in seconds since 1970, UTC, optionally followed by the principal
and a mapping of SASL extensions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from eventpub import masking
from eventpub.errors import ConfigError, SinkError


class TokenProvider:
    """Calls the function for one client; `failure` is the error of the last call, or None.

    Raises:
        ConfigError: config.token_provider: there is no such function.
        SinkError: sink.token_failed: the first call raised; a client would wait for 10 s.
    """

    def __init__(self, name: str, properties: str) -> None:
        self._name = name
        self._function = find_function(name)
        self.failure: str | None = None
        try:
            self._first: tuple[Any, ...] | None = self._call(properties)
        except Exception as error:
            raise token_failed(self.failure or str(error)) from error

    def __call__(self, properties: str) -> tuple[Any, ...]:
        """A token and its expiry, as confluent-kafka's `oauth_cb` expects."""
        first, self._first = self._first, None
        return first or self._call(properties)

    def _call(self, properties: str) -> tuple[Any, ...]:
        try:
            token, expires, *more = self._function(properties)
            masking.remember(token, passing=True)
            answer = (token, float(expires), *more)
        except Exception as error:
            text = masking.mask_url(str(error))
            self.failure = f"{self._name} raised {type(error).__name__}: {text}"
            raise
        self.failure = None
        return answer


def token_failed(how: str) -> SinkError:
    return SinkError(
        "sink.token_failed",
        f"no token for Kafka: {how}",
        where="sink.token_provider",
        suggestion="test the function on its own; it must return (token, expires), with expires in"
        " seconds since 1970",
        retriable=True,
    )


def provider_failed(how: str) -> SinkError:
    return SinkError(
        "sink.token_failed",
        f"the identity provider returned no token for Kafka: {how}",
        where="sink.properties.sasl.oauthbearer.token.endpoint.url",
        suggestion="check it, sasl.oauthbearer.client.id, sasl.oauthbearer.client.secret and"
        " sasl.oauthbearer.scope in [sink.properties], and that the provider can be reached; if its"
        " tokens are not JWTs with sub and exp, write a sink.token_provider",
        retriable=True,
    )


def find_function(name: str) -> Callable[[str], Any]:
    """Import the module and return its function; raises config.token_provider."""
    module, _, function = name.partition(":")
    try:
        found: Callable[[str], Any] = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError("it is not a function")
    except Exception as error:  # an import may raise anything
        raise ConfigError(
            "config.token_provider",
            f"there is no {name}: {type(error).__name__}: {masking.mask_url(str(error))}",
            where="sink.token_provider",
            suggestion="sink.token_provider names package.module:function; the package must be"
            " installed in eventpub's environment, or be on PYTHONPATH",
        ) from error
    return found
