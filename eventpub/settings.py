"""Loading the configuration: file, then environment, then flags; later beats earlier.

What must hold: a name that means nothing is refused with the nearest one that does; every problem
is reported at once; each value can be traced to where it came from; no secret appears in any
message. Names are checked by `eventpub.settings_sources`, values by the models of
`eventpub.config`; `eventpub.settings_problems` says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from eventpub import masking
from eventpub.config import Config
from eventpub.config_values import is_token
from eventpub.errors import ConfigError
from eventpub.properties import (
    FILE_SUFFIX,
    is_secret_property,
    refused_property,
    refused_spark_property,
)
from eventpub.settings_problems import CombinedConfigError, invalid_token, joined, problem_of
from eventpub.settings_sources import DEFAULT_FILE, KEYS, MAPS, SECTIONS, Key, Layers, collect
from eventpub.times import format_duration

__all__ = [
    "KEYS",
    "SECTIONS",
    "CombinedConfigError",
    "Key",
    "Loaded",
    "check_files",
    "default_of",
    "load",
    "shown",
]


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from.

    Args:
        config: what the packages take. A password file has been read: its text is `store.password`,
            which `masking.current` reads again.
        origins: by key: "default", "file …", "env …" or "flag …".
        file: the file that was read, or None.
    """

    config: Config
    origins: Mapping[str, str]
    file: Path | None


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
    layers, path = collect(file, overrides, environ, flags or {}, reads_file=reads_file)
    config = _validate(layers, path or DEFAULT_FILE)
    if layers.problems or config is None:
        raise joined(layers.problems)
    origins = {name: "default" for name, key in KEYS.items() if not key.is_map} | layers.origins
    config = _with_secret(config, origins, "store", "password")
    config = _with_secret(config, origins, "ops", "token")
    if config.ops.token is not None and not is_token(config.ops.token.get_secret_value()):
        raise invalid_token("ops.token_file", origins["ops.token"])
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
                result[f"{name}.{prop}"] = masking.MASK if hidden else masking.mask_url(text)
        else:
            result[name] = _shown(key, value)
    return result


def _shown(key: Key, value: Any) -> Any:
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        return masking.mask_url(secret) if key.name == "store.url" else masking.MASK
    if key.is_duration:
        return format_duration(value)
    if isinstance(value, tuple):
        one = key.name == "store.columns.aggregate_id" and len(value) == 1
        return value[0] if one else list(value)
    return str(value) if isinstance(value, Path) else value


def default_of(key: Key) -> Any:
    """A key's default as the file would write it; None where there is none."""
    if key.info.is_required() or key.is_map:
        return None
    return _shown(key, key.info.default)


# --- values


def _validate(layers: Layers, file: Path) -> Config | None:
    nested: dict[str, Any] = {s: {} for s in SECTIONS if "." not in s}
    for key, value in layers.values.items():
        owner = next((m for m in MAPS if key.startswith(f"{m}.")), None)
        path = [*owner.split("."), key.removeprefix(f"{owner}.")] if owner else key.split(".")
        target = nested
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value
    try:
        config = Config.model_validate(nested)
    except ValidationError as e:
        for detail in e.errors(include_url=False, include_input=False):
            layers.problems.append(problem_of(dict(detail), layers, file))
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


def _with_secret_files(config: Config, layers: Layers) -> Config:
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
    return masking.FileSecret(secret, file.absolute())
