"""Loading the configuration: file, then environment, then flags; later beats earlier.

What must hold: a name that means nothing is refused with the nearest one that does; every problem
is reported at once; each value can be traced to where it came from; no secret appears in any
message. Names are checked here and values by the models of `eventpub.config`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from eventpub import masking
from eventpub.config import (
    FILE_SUFFIX,
    Config,
    format_duration,
    is_secret_property,
    is_token,
    parse_duration,
    refused_property,
    refused_spark_property,
)
from eventpub.errors import ConfigError

DEFAULT_FILE = Path("eventpub.toml")
PREFIX = "EVENTPUB_"
_OTHER_VARIABLES = {
    "EVENTPUB_CONFIG",
    "EVENTPUB_CACHE",
    "EVENTPUB_FAILPOINT",
    "EVENTPUB_SPARK_LOG",
}
_TEST_PREFIX = "EVENTPUB_TEST_"
_SECRETS = {"store.url", "store.password", "ops.token"}


class CombinedConfigError(ConfigError):
    """Several things are wrong at once; the first gives the code, `problems` has them all."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.code, first.message, where=first.where, suggestion=first.suggestion)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """As of any error, with all of them under `problems`."""
        return super().to_dict() | {"problems": [p.to_dict() for p in self.problems]}


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from.

    Args:
        config: what the packages take. A password file has been read: its text is `store.password`.
        origins: by key: "default", "file …", "env …" or "flag …".
        file: the file that was read, or None.
    """

    config: Config
    origins: Mapping[str, str]
    file: Path | None


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
_MAPS = tuple(name for name, key in KEYS.items() if key.is_map)


@dataclass
class _Layers:
    """Values by key, the later layer on top, and what was wrong on the way."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)

    def put(self, key: str, value: Any, origin: str) -> None:
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


def load(
    file: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, str] | None = None,
    reads_file: bool = True,
) -> Loaded:
    """The effective configuration.

    Args:
        file: the file to read; None means EVENTPUB_CONFIG, or ./eventpub.toml where there is one.
        overrides: by key ("sink.topic"), stronger than file and environment.
        environ: the environment.
        flags: by key, the name of the flag that an override came from.
        reads_file: False: there is no file yet.

    Raises:
        ConfigError: one problem.
        CombinedConfigError: several.
    """
    layers = _Layers()
    path = _find_file(file, environ) if reads_file else None
    if path is not None:
        _add_file(layers, path)
    _add_environment(layers, environ)
    for key, value in overrides.items():
        origin = f"flag {(flags or {}).get(key, '--set ' + key)}"
        if key in _MAPS:
            _add_map(layers, key, value, origin)
        elif key in KEYS or any(key.startswith(f"{m}.") for m in _MAPS):
            layers.put(key, value, origin)
        else:
            layers.problems.append(_unknown_key(key, origin))
    config = _validate(layers, path or DEFAULT_FILE)
    if layers.problems or config is None:
        raise _joined(layers.problems)
    origins = {name: "default" for name, key in KEYS.items() if not key.is_map} | layers.origins
    config = _with_secret(config, origins, "store", "password")
    config = _with_secret(config, origins, "ops", "token")
    if config.ops.token is not None and not is_token(config.ops.token.get_secret_value()):
        raise _invalid_token("ops.token_file", origins["ops.token"])
    return Loaded(config, origins, path)


def check_files(files: Mapping[str, str | Path | None]) -> None:
    """Whether files can be read.

    Args:
        files: by the key that names it; None: none is named.

    Raises:
        ConfigError: config.file_unreadable
    """
    for key, file in files.items():
        try:
            if file is not None:
                Path(file).read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no file name"
            raise ConfigError(
                "config.file_unreadable",
                f"{file!s} cannot be read: {reason}",
                where=key,
                suggestion="give the publisher's user read access to it, or name another file",
            ) from None


def shown(loaded: Loaded) -> dict[str, Any]:
    """Every key's effective value as the file would write it; secrets are masked."""
    result: dict[str, Any] = {}
    for name, key in KEYS.items():
        value: Any = loaded.config
        for part in name.split("."):
            value = getattr(value, part)
        if key.is_map:
            for prop, text in value.items():
                of_file = f"{name}.{prop}{FILE_SUFFIX}" in loaded.origins
                hidden = of_file or is_secret_property(prop)
                result[f"{name}.{prop}"] = masking.MASK if hidden else masking.mask(text)
        else:
            result[name] = _shown(key, value)
    return result


def _shown(key: Key, value: Any) -> Any:
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        return masking.mask(secret) if key.name == "store.url" else masking.MASK
    if key.is_duration:
        return format_duration(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def default_of(key: Key) -> Any:
    """A key's default as the file would write it; None where there is none."""
    if key.info.is_required() or key.is_map:
        return None
    return _shown(key, key.info.default)


# --- the file


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is None and environ.get("EVENTPUB_CONFIG"):
        file = Path(environ["EVENTPUB_CONFIG"])
        origin = "EVENTPUB_CONFIG"
    else:
        origin = "--config"
    if file is None:
        return DEFAULT_FILE if DEFAULT_FILE.exists() else None
    if not file.is_file():
        raise ConfigError(
            "config.file_missing",
            f"there is no configuration file {file}",
            where=origin,
            suggestion=f"create it, or name another with --config; the default is {DEFAULT_FILE}",
        )
    return file


def _add_file(layers: _Layers, path: Path) -> None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(
            "config.file_invalid",
            f"{path} is not TOML: {e}",
            where=str(path),
            suggestion='text stands in quotes, names with dots too: "compression.type" = "lz4"',
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        if not isinstance(e, OSError | UnicodeDecodeError):  # of Python's own limits
            reason = "a number has thousands of digits, or tables stand in one another too deep"
        raise ConfigError(
            "config.file_invalid", f"{path} cannot be read: {reason}", where=str(path)
        ) from None
    _add_table(layers, document, "", f"file {path}")


def _add_table(layers: _Layers, table: Mapping[str, Any], prefix: str, origin: str) -> None:
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
        elif key in _MAPS:
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


def _add_environment(layers: _Layers, environ: Mapping[str, str]) -> None:
    variables = {key.variable: key.name for key in KEYS.values()}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or _is_of_others(variable, value):
            continue
        origin = f"env {variable}"
        if (key := variables.get(variable)) and key in _MAPS:
            _add_map(layers, key, value, origin)
        elif key:
            layers.put(key, value, origin)
        elif owner := next(
            (m for m in _MAPS if variable.startswith(KEYS[m].variable + "__")), None
        ):
            prop = variable.removeprefix(KEYS[owner].variable + "__").lower().replace("_", ".")
            layers.put(f"{owner}.{prop}", value, origin)
        else:
            near = _nearest(variable.upper(), variables)
            layers.problems.append(
                ConfigError(
                    "config.unknown_environment",
                    f"the environment variable {variable} belongs to no configuration key",
                    where=variable,
                    suggestion=f"did you mean {near}?" if near else _NAMES_OF_VARIABLES,
                )
            )


_NAMES_OF_VARIABLES = "unset it; the names are EVENTPUB_<SECTION>__<KEY>, two underscores between"


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


def _add_map(layers: _Layers, key: str, value: Any, origin: str) -> None:
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


# --- names


def _unknown_key(key: str, origin: str) -> ConfigError:
    name = key.rpartition(".")[2]
    elsewhere = [k for k in KEYS if k.rpartition(".")[2] == name]
    near = elsewhere[0] if elsewhere else _nearest(key, [*KEYS, *SECTIONS])
    if near is None:
        near = _nearest(name, KEYS, lambda k: k.rpartition(".")[2])
    section = key.partition(".")[0]
    if near:
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


# --- values


def _validate(layers: _Layers, file: Path) -> Config | None:
    nested: dict[str, Any] = {s: {} for s in SECTIONS if "." not in s}
    for key, value in layers.values.items():
        owner = next((m for m in _MAPS if key.startswith(f"{m}.")), None)
        path = [*owner.split("."), key.removeprefix(f"{owner}.")] if owner else key.split(".")
        target = nested
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
    try:
        config = Config.model_validate(nested)
    except ValidationError as e:
        for detail in e.errors(include_url=False, include_input=False):
            layers.problems.append(_problem(dict(detail), layers, file))
        return None
    config = _with_secret_files(config, layers)
    sink, spark = config.sink, config.spark
    of_sink = [(n, refused_property(n, v, sink.delivery)) for n, v in sink.properties.items()]
    of_spark = [(n, refused_spark_property(n, v)) for n, v in spark.properties.items()]
    for section, found in (("sink", of_sink), ("spark", of_spark)):
        for name, reason in found:
            key = f"{section}.properties.{name}"
            if reason is None:
                continue
            layers.problems.append(
                ConfigError(
                    "config.contradiction",
                    f"{key} ({layers.origins[key]}) cannot be set like this: {reason}",
                    where=key,
                    suggestion=f"remove {name} from [{section}.properties]",
                )
            )
    return config


def _problem(detail: dict[str, Any], layers: _Layers, file: Path) -> ConfigError:
    key = _key_of(detail["loc"], layers)
    context = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            there = "" if file.exists() else " (no such file)"
            variable = KEYS[key].variable
            return ConfigError(
                "config.missing_key",
                f"{key} is not set; looked in {file}{there}, {variable} and the flags",
                where=key,
                suggestion=f"set it in the file, by {variable}, or by --set {key}=…",
            )
        case "contradiction":
            return ConfigError(
                "config.contradiction",
                context["message"],
                where=context["key"],
                suggestion=context["suggestion"],
            )
    origin = layers.origins.get(key, "default")
    if detail["type"] == "token":
        return _invalid_token(key, origin)
    return ConfigError(
        "config.invalid_value",
        f"{key} = {_quoted(key, layers.values.get(key))} ({origin}) is not valid",
        where=key,
        suggestion=f"it must be: {_wanted(detail, key)}",
    )


def _key_of(loc: Sequence[str | int], layers: _Layers) -> str:
    """The key of a fault, which may be that of one name of its list."""
    for length in range(len(loc), 0, -1):
        key = ".".join(str(part) for part in loc[:length])
        if key in KEYS or key in layers.values:
            return key
    return ".".join(str(part) for part in loc)


def _invalid_token(key: str, origin: str) -> ConfigError:
    return ConfigError(
        "config.invalid_token",
        f"the token of the dashboard ({origin}) has fewer than 16 characters, or ones that an HTTP"
        " header cannot carry",
        where=key,
        suggestion="use 16 or more printable ASCII characters, without spaces around them:"
        " openssl rand -hex 16",
    )


_TYPES = {
    **dict.fromkeys(
        ("int_parsing", "int_parsing_size", "int_from_float", "int_type"), "a whole number"
    ),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("string_type", "string_unicode"), "text"),
    "finite_number": "a whole number",
    "path_type": "the path of a file or folder",
    "tuple_type": 'a list of names, such as ["a", "b"]',
}
"""By the library's kind of fault what a value must be."""


def _wanted(detail: dict[str, Any], key: str) -> str:
    """What a value must be, in our words."""

    def bound(limit: int) -> str:
        return format_duration(limit) if key in KEYS and KEYS[key].is_duration else str(limit)

    context = detail.get("ctx", {})
    match detail["type"]:
        case "string_too_short":
            return "some text; leave the key out for the default"
        case "greater_than_equal":
            return f"at least {bound(context['ge'])}"
        case "less_than_equal":
            return f"at most {bound(context['le'])}"
    if detail["type"] in _TYPES:
        return _TYPES[detail["type"]]
    return re.sub(r"^(Value error, |Input should be )", "", detail["msg"])


def _quoted(key: str, value: Any) -> str:
    if key in _SECRETS or (key not in KEYS and is_secret_property(key)):
        return masking.MASK
    text = masking.mask(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:117]}…"


def _joined(problems: Sequence[ConfigError]) -> ConfigError:
    return problems[0] if len(problems) == 1 else CombinedConfigError(problems)


# --- secrets


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


def _with_secret_files(config: Config, layers: _Layers) -> Config:
    """`"sasl.password.file"` in `[sink.properties]` as `"sasl.password"`, with the file's text.

    Executors need not have the file. Whatever stands in one is taken for a secret.
    """
    properties: dict[str, str] = {}
    for name, value in config.sink.properties.items():
        if not name.endswith(FILE_SUFFIX):
            properties[name] = value
            continue
        meant, key = name.removesuffix(FILE_SUFFIX), f"sink.properties.{name}"
        try:
            if meant in config.sink.properties:
                raise ConfigError(
                    "config.contradiction",
                    f"both sink.properties.{meant} and {key} are set",
                    where=key,
                    suggestion="keep one of the two",
                )
            properties[meant] = _secret_of(Path(value), key)
        except ConfigError as problem:
            layers.problems.append(problem)
        else:
            layers.origins[f"sink.properties.{meant}"] = f"file {value}"
    sink = config.sink.model_copy(update={"properties": properties})
    return config.model_copy(update={"sink": sink})


def _with_secret(config: Config, origins: dict[str, str], section: str, name: str) -> Config:
    """The text of `<name>_file` in the place of `<name>`: executors need not have the file."""
    part = getattr(config, section)
    file: Path | None = getattr(part, f"{name}_file")
    if file is None:
        return config
    secret = _secret_of(file, f"{section}.{name}_file")
    origins[f"{section}.{name}"] = f"file {file}"
    changed = part.model_copy(update={name: SecretStr(secret), f"{name}_file": None})
    return config.model_copy(update={section: changed})


def _secret_of(file: Path, key: str) -> str:
    """The text of a file, without its last line end; never shown from now on.

    Raises:
        ConfigError: `config.password_file`: it cannot be read, or is empty.
    """
    what = {"store": "password", "ops": "token"}.get(key.partition(".")[0], "secret")
    try:
        secret = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as e:
        is_missing = isinstance(e, FileNotFoundError)
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise ConfigError(
            "config.password_file",
            f"there is no {what} file {file}"
            if is_missing
            else f"the {what} file {file} cannot be read: {reason}",
            where=key,
            suggestion=f"write the {what} into it, readable for the account that runs eventpub",
        ) from None
    if not secret:
        raise ConfigError(
            "config.password_file",
            f"the {what} file {file} is empty",
            where=key,
            suggestion=f"write the {what} into it, or remove the key",
        )
    masking.remember(secret)
    return secret
