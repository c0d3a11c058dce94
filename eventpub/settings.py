"""Loading the configuration: the file, then the environment, then flags; later beats earlier.

Each source is a list of (name, value, origin), merged into one table, which the models of
`eventpub.config` check. What must hold: a name that means nothing is refused with the nearest one
that does; every problem is reported at once; each value can be traced to where it came from; no
secret appears in any message.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from eventpub import masking
from eventpub.config import Config, contradictions
from eventpub.config_values import FILE_SUFFIX, is_secret_property
from eventpub.errors import ConfigError
from eventpub.times import format_duration

PREFIX = "EVENTPUB_"
_DEFAULT_FILE = Path("eventpub.toml")
_Source = Iterable[tuple[str, Any, str]]


# --- keys


class Key(NamedTuple):
    """One key, as the documentation and `config show` see it.

    Args:
        name: "store.columns.id"
        variable: its environment variable.
        info: its type, default and meaning.
        is_map: it holds properties of a library, under names of their own.
        default: as the file would write it; None where there is none.
    """

    name: str
    variable: str
    info: FieldInfo
    is_map: bool
    default: Any


def effective(config: Config) -> dict[str, Any]:
    """Every key's value as the file would write it; secrets are masked."""
    return dict(_leaves(config.model_dump(mode="json")))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_NEEDED = {"app": {"id": "-"}, "store": {"url": "mysql+pymysql://-/-"}, "sink": {"topic": "-"}}
_DEFAULTS = effective(Config.model_validate(_NEEDED))


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for field, info in model.model_fields.items():
        name, kind = f"{prefix}{field}", info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{name}.")
        else:
            variable = PREFIX + name.upper().replace(".", "__")
            default = None if info.is_required() else _DEFAULTS.get(name)
            yield Key(name, variable, info, field == "properties", default)


KEYS: dict[str, Key] = {key.name: key for key in _walk(Config)}
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in KEYS))
MAPS: tuple[str, ...] = tuple(name for name, key in KEYS.items() if key.is_map)
_VARIABLES = {key.variable: key.name for key in KEYS.values()}


def _split(name: str) -> tuple[str, str]:
    """A key's section and the rest; a property's name, which may have dots, is one."""
    section = next((m for m in MAPS if name.startswith(f"{m}.")), name.rpartition(".")[0])
    return section, name.removeprefix(f"{section}.")


def _is_secret(name: str) -> bool:
    if name in KEYS:
        return "SecretStr" in str(KEYS[name].info.annotation)
    return is_secret_property(name)


# --- loading


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
        file: the file to read; None means EVENTPUB_CONFIG, or ./eventpub.toml where there is one.
        overrides: by key ("sink.topic"), stronger than file and environment.
        environ: the environment.
        flags: by key, the name of the flag that an override came from.
        reads_file: False: there is no file yet.
        defaults: by key, of keys that have none and that the caller does without.

    Raises:
        ConfigError: one problem.
        CombinedConfigError: several.
    """
    is_named = file is not None or bool(environ.get("EVENTPUB_CONFIG"))
    named = file or Path(environ.get("EVENTPUB_CONFIG") or _DEFAULT_FILE)
    is_read = reads_file and (is_named or named.exists())
    flag = {key: f"--set {key}" for key in overrides} | {**(flags or {})}
    table = _Table(named)
    table.add((k, v, "default") for k, v in (defaults or {}).items())
    table.add((k, v, f"file {named}") for k, v in (_read_toml(named) if is_read else {}).items())
    table.add(_of_environment(environ))
    table.add((k, v, f"flag {flag[k]}") for k, v in overrides.items())
    config = table.validated()
    if config is None or table.problems:
        raise CombinedConfigError(table.problems) if table.problems[1:] else table.problems[0]
    origins = {name: "default" for name, key in KEYS.items() if not key.is_map} | table.origins
    return Loaded(config, origins, named if is_read else None)


def read_file(file: Path, key: str) -> str:
    """The text of a file that a key names.

    Raises:
        ConfigError: config.file_unreadable
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            "config.file_unreadable",
            f"{file} cannot be read: {reason}",
            where=key,
            suggestion="name a file that the account that runs eventpub can read",
        ) from None


def _read_secret(file: Path, key: str) -> masking.FileSecret:
    text = read_file(file, key).rstrip("\r\n")
    if not text:
        raise ConfigError(
            "config.password_file",
            f"{file} is empty",
            where=key,
            suggestion="write the secret into it, or remove the key",
        )
    masking.remember(text)
    return masking.FileSecret(text, file.absolute())


def _read_toml(file: Path) -> dict[str, Any]:
    text = read_file(file, str(file))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        is_repeated = re.match("Cannot (overwrite|declare|redefine)|Duplicate", str(error))
        raise ConfigError(
            "config.file_invalid",
            f"{file} is not TOML: {error}",
            where=str(file),
            suggestion="the key or section on this line is a duplicate: remove one"
            if is_repeated
            else 'put text in quotes, and names with dots, too: "compression.type" = "lz4"',
        ) from None


_OF_OTHERS = re.compile(
    rf"{PREFIX}((CONFIG|CACHE|FAILPOINT|SPARK_LOG|TEST_\w+)="
    r"|(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)="
    r"|(\w+_)?PORT=(tcp|udp)://)"
)
"""No keys: what is read elsewhere, and what Kubernetes sets for a service called "eventpub"."""
_OURS = re.compile(rf"{PREFIX}|(?i:{PREFIX}[a-z]+__)")
"""In another case only with two underscores: `eventpub_home` may be a shell's own."""


def _of_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for variable, value in sorted(environ.items()):
        if not _OURS.match(variable) or _OF_OTHERS.match(f"{variable}={value}"):
            continue
        owner, is_property, prop = variable.partition("PROPERTIES__")
        if is_property and (section := _VARIABLES.get(f"{owner}PROPERTIES")):
            name = f"{section}.{prop.lower().replace('_', '.')}"
        else:
            name = _VARIABLES.get(variable, variable)
        yield name, value, f"env {variable}"


# --- values


class _Table:
    """The values of all sources by key, the last source on top, and what is wrong with them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[ConfigError] = []

    def add(self, source: _Source) -> None:
        """Put a source above the others.

        A password within its URL is above those of the others; `store.password` of the same source
        is above that.
        """
        entries = [*source]
        url = next((str(value) for name, value, _ in entries if name == "store.url"), "")
        if re.match(r"[^:]*://[^/?#]*:[^/?#]*@", url):
            for key in ("store.password", "store.password_file"):
                self._values.pop(key, None)
                self.origins.pop(key, None)
        for name, value, origin in entries:
            self._put(name, value, origin)

    def _put(self, name: str, value: Any, origin: str) -> None:
        """A value, or a table of some; ``compression.type = "lz4"`` without quotes is one, too."""
        if name in MAPS and isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        is_table, is_property = name in SECTIONS or name in MAPS, _split(name)[0] in MAPS
        if isinstance(value, dict) and (is_table or is_property):
            for key, inner in value.items():
                self._put(f"{name}.{key}", inner, origin)
        elif is_table:
            self._refuse(
                "config.invalid_value",
                f"{name} ({origin}) is a table, not a value",
                name,
                fix=f"write [{name}] on a line of its own, its keys below it; in the environment,"
                " properties are a JSON object",
            )
        elif name in KEYS or is_property:
            for secret in _secrets_in(name, value):
                masking.remember(secret)
            self._values[name], self.origins[name] = value, origin
        else:
            message = f"there is no configuration key {name} ({origin})"
            self._refuse("config.unknown_key", message, name, fix=_meant(name, origin))

    def _refuse(self, code: str, message: str, key: str, *, fix: str) -> None:
        self.problems.append(ConfigError(code, message, where=key, suggestion=fix))

    def _read_secret_files(self) -> None:
        """Replace `store.password_file` by `store.password`, and so on.

        Other machines need not have the file. The content of any is taken for a secret.
        """
        for key, file in [*self._values.items()]:
            is_property = _split(key)[0] == "sink.properties"
            meant = key.removesuffix(FILE_SUFFIX if is_property else "_file")
            is_named = meant != key and (is_property or (meant in KEYS and file != ""))
            if not is_named or not isinstance(file, str):
                continue
            del self._values[key]
            if meant in self._values:
                both = f"both {meant} and {key} are set"
                self._refuse("config.contradiction", both, key, fix="keep one of the two")
                continue
            try:
                secret = _read_secret(Path(file), key)
            except ConfigError as problem:
                self.problems.append(problem)
                continue
            self._values[meant] = secret if is_property else SecretStr(secret)
            self.origins[meant] = f"file {file}"

    def validated(self) -> Config | None:
        self._read_secret_files()
        nested: dict[str, Any] = {s: {} for s in SECTIONS if "." not in s}
        for key, value in self._values.items():
            section, name = _split(key)
            target = nested
            for part in section.split("."):
                target = target.setdefault(part, {})
            target[name] = value
        try:
            config = Config.model_validate(nested)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                self._refuse_value(detail)
            return None
        self.problems += contradictions(config, self.origins)
        return config

    def _refuse_value(self, detail: Mapping[str, Any]) -> None:
        names = accumulate(map(str, detail["loc"]), "{}.{}".format)
        # the fault may be that of one name of a list
        key = [name for name in names if name in KEYS or name in self._values][-1]
        if detail["type"] == "missing":
            there = "" if self._file.exists() else " (no such file)"
            variable = KEYS[key].variable
            self._refuse(
                "config.missing_key",
                f"{key} is not set; looked in {self._file}{there}, {variable} and the flags",
                key,
                fix=f"set it in the file, by {variable}, or by --set {key}=…",
            )
        else:
            value, origin = _quoted(key, self._values.get(key)), self.origins.get(key, "default")
            self._refuse(
                "config.invalid_value",
                f"{key} = {value} ({origin}) is not valid",
                key,
                fix=f"it must be: {_wanted(detail, key)}",
            )


def _meant(name: str, origin: str) -> str:
    """What a wrong name was meant for: a key or section of another section, or a misspelt one."""
    is_variable = origin.startswith("env ")
    written = name.removeprefix(PREFIX).replace("__", ".") if is_variable else name
    known = {key: key for key in (*KEYS, *SECTIONS)}
    by_last = {key.rpartition(".")[2]: key for key in reversed(KEYS)}
    wrong = written.lower()
    last = wrong.rpartition(".")[2]
    near = known.get(wrong) or by_last.get(last)
    for names, text in ((known, wrong), (by_last, last)):
        if near is None and (found := difflib.get_close_matches(text, names, n=1, cutoff=0.75)):
            near = names[found[0]]
    if is_variable and near in KEYS:
        return f"did you mean {KEYS[near].variable}?"
    if is_variable:
        return "unset it; names are EVENTPUB_<SECTION>__<KEY>, with two underscores between"
    if near is not None:
        return f"did you mean {near if near in KEYS else f'[{near}]'}?"
    beside = [key for key in KEYS if _split(key)[0] == _split(name)[0]]
    return f"known are {', '.join(beside or SECTIONS)}"


_WANTED = {
    "int": "a whole number",
    "finite": "a whole number",
    "bool": "true or false",
    "string": "text",
    "string_too_short": "some text; leave the key out for the default",
    "path": "the path of a file or folder",
    "tuple": 'a list of names, such as ["a", "b"]',
    "greater": "at least {ge}",
    "less": "at most {le}",
}
"""What a value must be, by pydantic's name of the fault, or its first word."""


def _wanted(detail: Mapping[str, Any], key: str) -> str:
    kind: str = detail["type"]
    if kind == "string_pattern_mismatch":
        return " ".join(str(KEYS[key].info.description).split())
    wanted = _WANTED.get(kind) or _WANTED.get(kind.partition("_")[0])
    if wanted is None:
        return re.sub(r"^(Value error, |Input should be )", "", detail["msg"])
    limits = detail.get("ctx", {})
    if isinstance(KEYS[key].default, str):
        limits = {name: format_duration(micros) for name, micros in limits.items()}
    return wanted.format_map(limits)


def _quoted(key: str, value: Any) -> str:
    if _is_secret(key):
        return masking.MASK
    text = masking.mask_url(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:117]}…"


def _secrets_in(key: str, value: Any) -> list[str]:
    """What of a value must never be shown: passwords of a URL, of options of Java, or all of it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return []
    text = str(value)
    named = re.findall(r"""-D([^\s=]+)=("[^"]*"|'[^']*'|\S+)""", text)
    if key == "store.url":
        named = re.findall(r"[?&]([^=&#]+)=([^&#]*)", text)
        # up to the last @ of its first part, and of all: it may have special characters
        ends = (r"[^/]*", r".*")
        named += [("password", p) for end in ends for p in re.findall(f"://[^:/@]*:({end})@", text)]
    elif _is_secret(key):
        return [text]
    return [word.strip("\"'") for name, word in named if is_secret_property(name)]
