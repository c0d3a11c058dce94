"""Loading the configuration: the file, then the environment, then flags; later beats earlier.

An unknown name is refused with the nearest known one; all problems are reported at once, each with
where its value came from; no secret appears in any message.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from eventpub import masking
from eventpub.config import Config, contradictions
from eventpub.config_values import is_secret_property, read_file, read_secret
from eventpub.errors import ConfigError
from eventpub.times import format_duration

PREFIX = "EVENTPUB_"
MAPS = ("sink.properties", "spark.properties")
"""Keys that hold properties of a library."""


def effective(config: Config) -> dict[str, Any]:
    """Every key's value as the file would write it; secrets are masked."""
    return dict(_leaves(config.model_dump(mode="json")))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        inner, key = value, f"{prefix}{name}"
        if isinstance(value, str) and key in MAPS:
            with contextlib.suppress(ValueError, RecursionError):
                inner = json.loads(value)
        yield from _leaves(inner, f"{key}.") if isinstance(inner, dict) else [(key, value)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _keys(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def variable_of(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")


KEYS: dict[str, FieldInfo] = dict(_keys(Config))
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KEYS))
_NEEDED = {"app": {"id": "-"}, "store": {"url": "mysql+pymysql://-/-"}, "sink": {"topic": "-"}}
_ALL = effective(Config.model_validate(_NEEDED))
DEFAULTS = {name: value for name, value in _ALL.items() if not KEYS[name].is_required()}
"""As the file would write them."""
_VARIABLES = {variable_of(key): key for key in KEYS}


def _split(name: str) -> tuple[str, str]:
    """A key's section and the rest, which may have dots where it is a property."""
    section = next((m for m in MAPS if name.startswith(f"{m}.")), name.rpartition(".")[0])
    return section, name.removeprefix(f"{section}.")


def _is_secret(name: str) -> bool:
    if name not in KEYS:
        return is_secret_property(name)
    # a map as text that is not one may have any of its secrets
    return name in MAPS or "SecretStr" in str(KEYS[name].annotation)


class CombinedConfigError(ConfigError):
    """Several things are wrong at once; the first gives the code, `problems` has them all."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.code, first.message, where=first.where, suggestion=first.suggestion)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"problems": [p.to_dict() for p in self.problems]}


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from.

    Args:
        config: secrets in files have been read, and are read again by `masking.current`.
        origins: by key: "default", "file …", "env …" or "flag …".
        file: the file that was read, or None.
    """

    config: Config
    origins: Mapping[str, str]
    file: Path | None


def load(  # noqa: PLR0913 (one a source)
    file: Path | None,
    overrides: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, str] | None = None,
    reads_file: bool = True,
    defaults: Mapping[str, str] | None = None,
) -> Loaded:
    """The effective configuration.

    Args:
        file: None means EVENTPUB_CONFIG, or ./eventpub.toml where there is one.
        overrides: by key ("sink.topic"), stronger than file and environment.
        flags: by key, the name of the flag that an override came from.
        reads_file: False: there is no file yet.
        defaults: by key, of keys that have none and that the caller does without.

    Raises:
        ConfigError: one problem, or as a CombinedConfigError several.
    """
    is_named = file is not None or bool(environ.get("EVENTPUB_CONFIG"))
    named = file or Path(environ.get("EVENTPUB_CONFIG") or "eventpub.toml")
    is_read = reads_file and (is_named or named.exists())
    flag_of = {name: f"flag {(flags or {}).get(name, f'--set {name}')}" for name in overrides}
    table = _Table(named)
    table.add(("default", defaults or {}))
    table.add((f"file {named}", _read_toml(named) if is_read else {}))
    table.add(*_of_environment(environ))
    table.add(*((flag_of[name], {name: value}) for name, value in overrides.items()))
    values = table.values()
    config = table.config(values)
    if config is None or table.problems:
        raise CombinedConfigError(table.problems) if table.problems[1:] else table.problems[0]
    origins = {name: "default" for name in KEYS if name not in MAPS}
    origins |= {name: entry.origin for name, entry in values.items()}
    return Loaded(config, origins, named if is_read else None)


def _read_toml(file: Path) -> dict[str, Any]:
    text = read_file(file, str(file))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "config.file_invalid",
            f"{file} is not TOML: {error}",
            where=str(file),
            suggestion='put text in quotes, and names with dots, too: "compression.type" = "lz4";'
            " if a key or section appears twice, remove one",
        ) from None


_OF_OTHERS = re.compile(
    rf"{PREFIX}((CONFIG|CACHE|FAILPOINT|SPARK_LOG|TEST_\w+)="
    r"|(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)="
    r"|(\w+_)?PORT=(tcp|udp)://)"
)
"""No keys: what is read elsewhere, and what Kubernetes sets for a service called "eventpub"."""
_OURS = re.compile(rf"{PREFIX}|(?i:{PREFIX}[a-z]+__)")
"""In another case only with two underscores: `eventpub_home` may be a shell's own."""


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    for variable, value in sorted(environ.items()):
        if _OURS.match(variable) and not _OF_OTHERS.match(f"{variable}={value}"):
            name = _VARIABLES.get(variable, variable)
            owner, _, prop = variable.partition("PROPERTIES__")
            if prop and (section := _VARIABLES.get(f"{owner}PROPERTIES")):
                name = f"{section}.{prop.lower().replace('_', '.')}"
            yield f"env {variable}", {name: value}


class _Entry(NamedTuple):
    value: Any
    origin: str


class _Table:
    """The values of all sources by key, and what is wrong with them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: dict[str, _Entry] = {}
        self.problems: list[ConfigError] = []

    def add(self, *source: tuple[str, Mapping[str, Any]]) -> None:
        """Add a source that beats those before it; a password within its URL beats theirs, too."""
        found = {k: _Entry(v, origin) for origin, table in source for k, v in _leaves(table)}
        url = found.get("store.url", _Entry("", "")).value
        if re.match(r"[^:]*://[^/?#]*:[^/?#]*@", str(url)):
            self._forget("store.password", "store.password_file")
        for name, entry in found.items():
            for secret in _secrets_in(name, entry.value):
                masking.remember(secret)
            in_file = _named_by_file(name, entry.value)
            if in_file in found:
                both = f"both {in_file} and {name} are set"
                self._refuse("config.contradiction", both, name, fix="keep one of the two")
            else:
                self._forget(in_file, f"{name}_file", f"{name}.file")
                self._entries[name] = entry

    def _forget(self, *names: str | None) -> None:
        for name in names:
            self._entries.pop(str(name), None)

    def _refuse(self, code: str, message: str, key: str, *, fix: str) -> None:
        self.problems.append(ConfigError(code, message, where=key, suggestion=fix))

    def values(self) -> dict[str, _Entry]:
        """By key: without what is unknown, with the secrets that are in files."""
        found = {}
        for name, entry in self._entries.items():
            in_file = _named_by_file(name, entry.value)
            if name not in KEYS and _split(name)[0] not in MAPS:
                unknown = f"there is no configuration key {name} ({entry.origin})"
                self._refuse("config.unknown_key", unknown, name, fix=_nearest(name, entry.origin))
            elif name in KEYS or in_file is None:
                found[name] = entry
            if in_file is not None:
                try:
                    secret = read_secret(Path(entry.value), name)
                    value = SecretStr(secret) if in_file in KEYS else secret
                    found[in_file] = _Entry(value, f"file {entry.value}")
                except ConfigError as error:
                    self.problems.append(error)
        return found

    def config(self, values: Mapping[str, _Entry]) -> Config | None:
        """None: a problem is why."""
        nested: dict[str, Any] = {s: {} for s in SECTIONS if "." not in s}
        for key in sorted(values, reverse=True):  # properties before their map
            section, name = _split(key)
            target = nested
            for part in section.split("."):
                target = target.setdefault(part, {})
            target[name] = values[key].value
        try:
            config = Config.model_validate(nested)
        except ValidationError as refused:
            for detail in refused.errors(include_url=False, include_input=False):
                self._refuse_value(detail, values)
            return None
        for problem in contradictions(config):
            if (entry := values.get(str(problem.where))) is not None:
                problem.message += f" ({entry.origin})"
            self.problems.append(problem)
        return config

    def _refuse_value(self, detail: Mapping[str, Any], values: Mapping[str, _Entry]) -> None:
        key = ".".join(map(str, detail["loc"]))
        if detail["type"] == "missing":
            there, variable = "" if self._file.exists() else " (no such file)", variable_of(key)
            missing = f"{key} is not set; looked in {self._file}{there}, {variable} and the flags"
            places = f"set it in the file, by {variable}, or by --set {key}=…"
            self._refuse("config.missing_key", missing, key, fix=places)
        else:
            value, origin = _quoted(key, values[key].value), values[key].origin
            invalid = f"{key} = {value} ({origin}) is not valid"
            self._refuse("config.invalid_value", invalid, key, fix=_wanted(detail, key))


_FILES_OF_LIBRARY = ("assertion.file", "assertion.jwt.template.file", "assertion.private.key.file")
"""Ends of properties of librdkafka itself, which reads these files."""


def _named_by_file(name: str, value: Any) -> str | None:
    """The key whose value is in the file that `store.password_file`, for example, names."""
    is_property = name.startswith("sink.properties.") and not name.endswith(_FILES_OF_LIBRARY)
    meant = name.removesuffix(".file" if is_property else "_file")
    is_named = is_property or (value and meant in KEYS)
    return meant if meant != name and isinstance(value, str) and is_named else None


def _nearest(name: str, origin: str) -> str:
    is_variable = origin.startswith("env ")
    written = (name.removeprefix(PREFIX).replace("__", ".") if is_variable else name).lower()
    names = {key.rpartition(".")[2]: key for key in reversed(KEYS)} | {key: key for key in KEYS}
    names |= {} if is_variable else {section: f"[{section}]" for section in SECTIONS}
    for text in (written, written.rpartition(".")[2]):
        for near in get_close_matches(text, names, 1, 0.75):
            return f"did you mean {variable_of(names[near]) if is_variable else names[near]}?"
    if is_variable:
        return "unset it; names are EVENTPUB_<SECTION>__<KEY>, with two underscores between"
    beside = [key for key in KEYS if _split(key)[0] == _split(name)[0]]
    return f"known are {', '.join(beside or SECTIONS)}"


_WORDS = {"int": "a whole number", "finite": "a whole number", "bool": "true or false"}


def _wanted(detail: Mapping[str, Any], key: str) -> str:
    kind = detail["type"].partition("_")[0]
    said = _WORDS.get(kind) or re.sub("^(Value error, |Input should be )", "", detail["msg"])
    if kind in {"greater", "less"}:
        [(name, limit)] = detail["ctx"].items()
        shown = format_duration(limit) if isinstance(DEFAULTS.get(key), str) else limit
        said = f"at {'least' if name == 'ge' else 'most'} {shown}"
    elif detail["type"] == "string_type":
        said = "text, in quotes"
    elif kind not in {"literal", "value", *_WORDS} or not said:
        info = KEYS.get(key) or KEYS[_split(key)[0]]
        meaning = f"its meaning: {' '.join(str(info.description).split())}"
        is_empty = detail["type"] in {"string_too_short", "path_type"}
        return f"it must not be empty; {meaning}" if is_empty else meaning
    return f"it must be: {said}"


def _quoted(key: str, value: Any) -> str:
    if _is_secret(key):
        return masking.MASK
    text = masking.mask_url(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:117]}…"


def _secrets_in(key: str, value: Any) -> list[str]:
    """The parts of a value that must never be shown: of a URL, of options of Java, or all of it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return []
    text = str(value)
    if _is_secret(key) and key != "store.url":
        return [text]
    named = re.findall(r"""-D([^\s=]+)=("[^"]*"|'[^']*'|\S+)""", text)
    named += re.findall(r"[?&]([^\s=&#]+)=([^&#]*)", text)
    # of a URL up to the last @ of its first part, and of all: it may have special characters
    ends = (r"[^/]*", r".*") if key == "store.url" else ()
    named += [("password", p) for end in ends for p in re.findall(f"://[^:/@]*:({end})@", text)]
    return [word.strip("\"'") for name, word in named if is_secret_property(name)]
