"""Where the values of the configuration come from: the file, the environment, the flags.

Each layer beats the one before it. A name that means nothing is a problem that names the nearest
one that does; what is a secret is remembered, so that nothing shows it, before anything else.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from eventpub import masking
from eventpub.config import Config
from eventpub.errors import ConfigError
from eventpub.properties import is_secret_property
from eventpub.times import parse_duration

DEFAULT_FILE = Path("eventpub.toml")
PREFIX = "EVENTPUB_"
_OTHER_VARIABLES = {
    "EVENTPUB_CONFIG",
    "EVENTPUB_CACHE",
    "EVENTPUB_FAILPOINT",
    "EVENTPUB_SPARK_LOG",
}
_TEST_PREFIX = "EVENTPUB_TEST_"


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as the documentation and `config show` see it."""

    name: str
    info: FieldInfo

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper().replace(".", "__")

    @property
    def is_duration(self) -> bool:
        """Whether its value is a duration."""
        return any(getattr(m, "func", None) is parse_duration for m in self.info.metadata)

    @property
    def is_map(self) -> bool:
        """Whether it holds properties of somebody else, under names of their own."""
        return self.name.endswith(".properties")


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield Key(f"{prefix}{name}", info)


KEYS: Mapping[str, Key] = {key.name: key for key in _walk(Config)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KEYS))
MAPS = tuple(name for name, key in KEYS.items() if key.is_map)


@dataclass
class Layers:
    """Values by key, the later layer on top, and what was wrong on the way."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a value, above those of the layers before."""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            text = str(value)
            if key in {"store.password", "ops.token"} or (
                key not in KEYS and is_secret_property(key)
            ):
                masking.remember(text)
            elif key == "store.url":
                _remember_url(text)
            elif key not in KEYS:
                _remember_java_options(text)
        self.values[key] = value
        self.origins[key] = origin

    def begin(self, url: object) -> None:
        """The next layer. A password in its URL, if any, is above those of the layers before.

        Within a layer, `store.password` wins over the URL's.
        """
        if _has_password(url):
            for key in ("store.password", "store.password_file"):
                self.values.pop(key, None)
                self.origins.pop(key, None)


def collect(
    file: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    *,
    reads_file: bool,
) -> tuple[Layers, Path | None]:
    """The values of all layers, and the file that was read; arguments as of `settings.load`.

    Raises:
        ConfigError: config.file_missing, config.file_invalid
    """
    layers = Layers()
    path = _find_file(file, environ) if reads_file else None
    if path is not None:
        _add_file(layers, path)
    _add_environment(layers, environ)
    _add_flags(layers, overrides, flags)
    return layers, path


# --- the file


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is None and environ.get("EVENTPUB_CONFIG"):
        file = Path(environ["EVENTPUB_CONFIG"])
        origin = "EVENTPUB_CONFIG"
    else:
        origin = "--config"
    if file is None:
        return DEFAULT_FILE if DEFAULT_FILE.exists() else None
    if file.is_dir():
        raise ConfigError(
            "config.file_missing",
            f"{file} is a folder, not a configuration file",
            where=origin,
            suggestion=f"name the file in it, such as {file / DEFAULT_FILE}",
        )
    if not file.is_file():
        raise ConfigError(
            "config.file_missing",
            f"there is no configuration file {file}",
            where=origin,
            suggestion=f"create it, or name another with --config; the default is {DEFAULT_FILE}",
        )
    return file


def _add_file(layers: Layers, path: Path) -> None:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        line = _line_of_repetition(text, str(e))
        raise ConfigError(
            "config.file_invalid",
            f"{path} is not TOML: {e}" if line is None else f"{path}, line {line}: {e}",
            where=str(path),
            suggestion='text stands in quotes, names with dots too: "compression.type" = "lz4"'
            if line is None
            else "the key or section of this line is there twice: remove one",
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        if not isinstance(e, OSError | UnicodeDecodeError):  # of Python's own limits
            reason = "a number has thousands of digits, or tables stand in one another too deep"
        raise ConfigError(
            "config.file_invalid", f"{path} cannot be read: {reason}", where=str(path)
        ) from None
    _add_table(layers, document, "", f"file {path}")


_REPETITION = re.compile(
    r"Cannot (overwrite a value|declare .* twice|redefine namespace)|Duplicate inline table key"
)
"""As Python's parser says that a name is there twice."""
_MOST_LINES = 2_000


def _line_of_repetition(text: str, reason: str) -> int | None:
    """The line that repeats a key or section, from 1; None: something else is wrong.

    The parser often names only the end of the file.
    """
    if not _REPETITION.match(reason):
        return None
    lines = text.split("\n")[:_MOST_LINES]
    for number in range(1, len(lines) + 1):
        try:
            tomllib.loads("\n".join(lines[:number]))
        except tomllib.TOMLDecodeError as e:
            if _REPETITION.match(str(e)):
                return number
    return None


def _add_table(layers: Layers, table: Mapping[str, Any], prefix: str, origin: str) -> None:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in SECTIONS:
            if isinstance(value, dict):
                _add_table(layers, value, f"{key}.", origin)
            else:
                layers.problems.append(
                    ConfigError(
                        "config.invalid_value",
                        f"{key} is a section, not a value ({origin})",
                        where=key,
                        suggestion=f"write [{key}] on a line of its own, its keys below it",
                    )
                )
        elif key in MAPS:
            _add_map(layers, key, value, origin)
        elif key in KEYS:
            layers.put(key, value, origin)
        else:
            layers.problems.append(_unknown_key(key, origin))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``compression.type = "lz4"`` without quotes is a table in a table; it is meant as a name."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- the environment


def _add_environment(layers: Layers, environ: Mapping[str, str]) -> None:
    layers.begin(environ.get(KEYS["store.url"].variable))
    variables = {key.variable: key.name for key in KEYS.values()}
    for variable, value in sorted(environ.items()):
        is_in_wrong_case = _is_in_wrong_case(variable)
        is_ours = variable.startswith(PREFIX) and not _is_of_others(variable, value)
        if not (is_ours or is_in_wrong_case):
            continue
        origin = f"env {variable}"
        if (key := variables.get(variable)) and key in MAPS:
            _add_map(layers, key, value, origin)
        elif key:
            layers.put(key, value, origin)
        elif owner := next((m for m in MAPS if variable.startswith(KEYS[m].variable + "__")), None):
            prop = variable.removeprefix(KEYS[owner].variable + "__").lower().replace("_", ".")
            layers.put(f"{owner}.{prop}", value, origin)
        else:
            near = _nearest_variable(variable.upper(), variables)
            layers.problems.append(
                ConfigError(
                    "config.unknown_environment",
                    f"the environment variable {variable} belongs to no configuration key",
                    where=variable,
                    suggestion=f"names are in upper case: {variable.upper()}"
                    if is_in_wrong_case
                    else f"did you mean {near}?"
                    if near
                    else _NAMES_OF_VARIABLES,
                )
            )


_NAMES_OF_VARIABLES = "unset it; the names are EVENTPUB_<SECTION>__<KEY>, two underscores between"


_BEGIN_OF_KEY = re.compile(
    rf"{PREFIX}({'|'.join(s.upper() for s in SECTIONS if '.' not in s)})__", re.IGNORECASE
)


def _is_in_wrong_case(variable: str) -> bool:
    """Whether it would be one of ours in upper case: `eventpub_sink__topic`.

    Only with a section and two underscores: `eventpub_home` may be a shell's own.
    """
    return not variable.startswith(PREFIX) and bool(_BEGIN_OF_KEY.match(variable))


def _nearest_variable(variable: str, variables: Iterable[str]) -> str | None:
    """The variable that is meant, by all after the prefix, or by the key alone."""
    name = variable.removeprefix(PREFIX)
    near = _nearest(name, variables, lambda v: v.removeprefix(PREFIX))
    return near or _nearest(name.rpartition("__")[2], variables, lambda v: v.rpartition("__")[2])


def _is_of_others(variable: str, value: str) -> bool:
    """Variables with our prefix that are no keys: our own, and those of Kubernetes' service links.

    A service called "eventpub" makes Kubernetes set EVENTPUB_SERVICE_HOST, EVENTPUB_PORT=tcp://…
    """
    if variable in _OTHER_VARIABLES or variable.startswith(_TEST_PREFIX):
        return True
    name = variable.removeprefix(PREFIX)
    return bool(
        re.fullmatch(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)", name)
        or (re.fullmatch(r"(\w+_)?PORT", name) and re.match(r"(tcp|udp)://", value))
    )


def _add_map(layers: Layers, key: str, value: Any, origin: str) -> None:
    """Properties as a table, or as the JSON text of one."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for prop, text in _flat(value):
            layers.put(f"{key}.{prop}", text, origin)
        return
    layers.problems.append(
        ConfigError(
            "config.invalid_value",
            f"{key} ({origin}) is neither a table nor a JSON object",
            where=key,
            suggestion=f'write [{key}] with "compression.type" = "lz4" below it, or'
            ' {"compression.type": "lz4"} in the environment',
        )
    )


# --- the flags


def _add_flags(layers: Layers, overrides: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    layers.begin(overrides.get("store.url"))
    for key, value in overrides.items():
        origin = f"flag {flags.get(key, '--set ' + key)}"
        if key in MAPS:
            _add_map(layers, key, value, origin)
        elif key in KEYS or any(key.startswith(f"{m}.") for m in MAPS):
            layers.put(key, value, origin)
        else:
            layers.problems.append(_unknown_key(key, origin))


# --- names


def _unknown_key(key: str, origin: str) -> ConfigError:
    name = key.rpartition(".")[2]
    elsewhere = [k for k in KEYS if k.rpartition(".")[2] == name]
    near = elsewhere[0] if elsewhere else _nearest(key, [*KEYS, *SECTIONS])
    if near is None:
        near = _nearest(name, KEYS, lambda k: k.rpartition(".")[2])
    section = key.partition(".")[0]
    lower = key.lower()
    if lower != key and (lower in KEYS or lower in SECTIONS):
        meant = lower if lower in KEYS else f"[{lower}]"
        suggestion = f"did you mean {meant}? names are in lower case"
    elif near:
        suggestion = f"did you mean {near}?"
    elif section in SECTIONS:
        known = ", ".join(k.removeprefix(f"{section}.") for k in KEYS if k.startswith(section))
        suggestion = f"[{section}] has {known}"
    else:
        suggestion = f"the sections are {', '.join(SECTIONS)}"
    return ConfigError(
        "config.unknown_key",
        f"there is no configuration key {key} ({origin})",
        where=key,
        suggestion=suggestion,
    )


def _nearest(
    name: str, known: Iterable[str], part: Callable[[str], str] = lambda k: k
) -> str | None:
    by_part = {part(k): k for k in known}
    found = difflib.get_close_matches(name, by_part, n=1, cutoff=0.75)
    return by_part[found[0]] if found else None


# --- secrets


def _has_password(url: object) -> bool:
    """Whether a URL names a password; an empty one, ``user:@host``, is named, too."""
    try:
        return isinstance(url, str) and urlsplit(url).password is not None
    except ValueError:
        return False


def _remember_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        if parts.password:
            masking.remember(parts.password)
        for name, _, value in (p.partition("=") for p in parts.query.split("&")):
            if is_secret_property(name):
                masking.remember(value)
    except ValueError:
        pass  # not a URL: validation refuses it without showing it
    if match := re.match(r"[^:]*://[^:/@]*:(.*)@", url):
        masking.remember(match[1])


def _remember_java_options(text: str) -> None:
    """As of `spark.driver.extraJavaOptions`: ``-Dsome.password=…``."""
    for name, value in re.findall(r"""-D([^\s=]+)=("[^"]*"|'[^']*'|\S+)""", text):
        if is_secret_property(name):
            masking.remember(value.strip("\"'"))
