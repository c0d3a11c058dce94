"""What is installed elsewhere than in a clone: the wheel, the image, the composition.

No container engine is needed: the wheel is built of exactly the files that the image's build gets,
and installed into an environment of its own.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eventpub.config import Ops
from eventpub.local.servers import Kafka
from eventpub.settings import KEYS, variable_of
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, eventually, insert, transaction

ROOT = Path(__file__).parents[1]
OURS = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with lines that go on put together."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def is_let_in(file: Path) -> bool:
    """Whether .dockerignore lets a file of the clone into the build."""
    let_in = True
    names = [str(path) for path in [file, *file.parents][:-1]]  # a folder's rule is its files', too
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        if any(Path("/", name).match(f"/{pattern}") for name in names if "**" not in pattern) or (
            any(
                fnmatch.fnmatch(f"/{name}", f"*/{pattern[3:]}") for name in names if "**" in pattern
            )
        ):
            let_in = line.startswith("!")
    return let_in


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of an installed wheel; the libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("image")
    build, wheels, environment = (folder / name for name in ("build", "wheels", "environment"))
    build.mkdir()
    for word, rest in instructions():
        if word != "COPY":
            continue
        *sources, target = rest.split()
        for source in sources:
            at = ROOT / source
            files = [at] if at.is_file() else [f for f in at.rglob("*") if f.is_file()]
            for file in files:
                if not is_let_in(file.relative_to(ROOT)):
                    continue
                to = build / target / (file.name if at.is_file() else file.relative_to(at))
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(build)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    ours = sysconfig.get_path("purelib")
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = subprocess.check_output([python, "-c", asked], text=True).strip()
    Path(theirs, "libraries.pth").write_text(f"{ours}\n")
    return environment / "bin" / "eventpub"


def test_the_wheel_of_the_image_publishes(
    installed: Path,
    database: FreshDatabase,
    kafka_server: Kafka,
    topic_name: str,
    tmp_path: Path,
) -> None:
    where = "import eventpub; print(eventpub.__file__)"
    python = str(installed.with_name("python"))
    shown = subprocess.check_output([python, "-c", where], text=True, cwd=tmp_path).strip()
    assert Path(shown).is_relative_to(installed.parents[1]), shown
    servers = kafka_server.bootstrap_servers
    spark = {"spark": {"master": "local[*]"}}
    folder = tmp_path / "publisher"
    with Publisher(folder, database.url, topic_name, servers, spark) as publisher:
        publisher.program = str(installed)

        for command in ("migrate", "doctor"):
            done = publisher.command(command)
            assert done.returncode == 0, done.stdout + done.stderr
        with transaction(database) as cursor:
            insert(cursor, "a", 1)
            insert(cursor, "a", 2)
            cursor.connection.commit()
        publisher.start()
        publisher.until_published("a", [1, 2])
        eventually(lambda: publisher.command("status").returncode == 0, 30)
        progress = publisher.state / "progress.json"
        eventually(lambda: json.loads(progress.read_text())["position"] > 0)
        publisher.kill()
        done = publisher.command("verify", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["result"]["missing"] == 0
    helped = [str(installed), "bench", "report", "--out", str(tmp_path / "none"), "--json"]
    done = subprocess.run(helped, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert json.loads(done.stdout)["error"]["code"] == "bench.not_installed"


def names_of_what_is_not_needed() -> set[str]:
    """Modules that are installed here, and not where only the publisher is: the extras'."""
    needed: set[str] = set()
    todo = [Requirement("eventpub")]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in needed and not requirement.extras:
            continue
        needed.add(name)
        for text in metadata.requires(name) or ():
            more = Requirement(text)
            extras = {"", *requirement.extras}
            if more.marker is None or any(more.marker.evaluate({"extra": e}) for e in extras):
                todo.append(more)
    return {
        module
        for module, of in metadata.packages_distributions().items()
        if not needed & {canonicalize_name(name) for name in of}
    }


def test_every_module_does_without_what_the_extras_install() -> None:
    """Where only the publisher is installed, the demo starts too."""
    blocked = names_of_what_is_not_needed()
    assert {"psutil", "matplotlib", "pytest"} <= blocked
    assert not {"pymysql", "cryptography", "pyspark"} & blocked
    script = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(sys.argv[1:])
import eventpub
for module in pkgutil.walk_packages(eventpub.__path__, "eventpub."):
    if not module.name.startswith("eventpub.migrations"):
        importlib.import_module(module.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *sorted(blocked)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_image_runs_as_a_user_of_its_own_and_says_how_it_is() -> None:
    found = dict(instructions())
    assert found["USER"] not in {"root", "0"}
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(found["ENTRYPOINT"]) == ["eventpub"]
    assert json.loads(found["CMD"]) == ["run"]
    check = json.loads(found["HEALTHCHECK"].partition("CMD")[2])
    port = Ops().http.rpartition(":")[2]
    assert f"127.0.0.1:{port}/healthz" in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")


def test_the_composition_does_not_start_a_wrong_configuration_for_ever() -> None:
    file = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services: dict[str, Any] = file["services"]
    assert set(services) == {"mysql", "kafka", "migrate", "doctor", "publisher"}
    for service in services.values():
        for name, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "test" in services[name]["healthcheck"]
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert services[name].get("restart", "no") == "no"
    publisher = services["publisher"]
    assert publisher["restart"] == "unless-stopped"
    assert publisher["environment"]["EVENTPUB_RUN__ENGINE"] == "threads"
    assert publisher["depends_on"]["doctor"]["condition"] == "service_completed_successfully"
    assert services["doctor"]["depends_on"]["migrate"]
    variables = {variable_of(key) for key in KEYS}
    for name in ("migrate", "doctor", "publisher"):
        assert set(services[name]["environment"]) <= variables
        assert services[name]["build"] == "."
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in file["volumes"]
