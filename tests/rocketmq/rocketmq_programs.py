"""Builds the programs of clients/ and returns their commands. Each is built once per test process.

The Go module and the Rust crate carry examples, which are built beside the programs: read from the package, with the
constants that a user has to fill in taken from environment variables, ``EXAMPLE_ENDPOINT``, ``EXAMPLE_TOPIC`` and
``EXAMPLE_CONSUMERGROUP``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from escrowmq_lab.servers import maven
from escrowmq_lab.servers.process import run
from escrowmq_lab.servers.seam import Absent
from own_home import CACHE

FOLDER = Path(__file__).parent / "clients"
GO_MODULE = "github.com/apache/rocketmq-clients/golang/v5"
RUST_EXAMPLES = ("producer", "fifo_producer", "delay_producer", "transaction_producer", "simple_consumer")

_CACHE = CACHE / "escrowmq" / "rocketmq"


def _find(program: str) -> str:
    """Return the path of a program. Raises FileNotFoundError."""
    found = shutil.which(program)
    if found is None:
        raise FileNotFoundError(program)
    return found


def _digest(*sources: Path) -> str:
    """Return a short hash of source files."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


@contextmanager
def _made(name: str) -> Iterator[Path | None]:
    """Provide an empty folder that becomes the cache's folder of a name; None if that is there. One process at a time,
    and a build that fails leaves nothing."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (_CACHE / name).is_dir():
            yield None
            return
        with tempfile.TemporaryDirectory(dir=_CACHE) as making:
            folder = Path(making) / "made"
            folder.mkdir()
            yield folder
            folder.rename(_CACHE / name)


def _build_python() -> list[str]:
    return [sys.executable, str(FOLDER / "python" / "client.py")]


def _build_node() -> list[str]:
    """Install the package into the cache, once a version."""
    npm = _find("npm")
    package = "rocketmq-client-nodejs@1.0.8"
    with _made(package) as folder:
        if folder is not None:
            run([npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), package])
    return ["env", f"NODE_PATH={_CACHE / package / 'node_modules'}", "node", str(FOLDER / "node" / "client.js")]


def _build_java() -> list[str]:
    """Compile the program against the jar of its pom."""
    java, javac = _find("java"), _find("javac")
    source = FOLDER / "java" / "Client.java"
    try:
        jars = maven.libraries(FOLDER / "java" / "pom.xml", "rocketmq-client")
    except Absent as problem:
        raise FileNotFoundError(str(problem)) from None
    name = f"java-{_digest(source)}"
    with _made(name) as folder:
        if folder is not None:
            run([javac, "-cp", f"{jars}/*", "-d", str(folder), str(source)])
    # A small heap and one compiler: many of them start beside other tests.
    return [java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", f"{_CACHE / name}:{jars}/*", "Client"]


def _build_go() -> list[str]:
    """Build the program with the module that its go.mod names."""
    go = _find("go")
    sources = FOLDER / "go" / "main.go", FOLDER / "go" / "go.mod"
    name = f"go-{_digest(*sources)}"
    with _made(name) as folder:
        if folder is not None:
            (folder / "source").mkdir()
            for source in sources:
                shutil.copy(source, folder / "source")
            # What it downloads goes into a temporary folder, too, which must be removable.
            places = {
                "GOPATH": f"{folder}/path",
                "GOCACHE": f"{folder}/cache",
                "GOFLAGS": "-modcacherw -buildvcs=false",
            }
            run([go, "-C", f"{folder}/source", "mod", "tidy"], environment=places)
            run([go, "-C", f"{folder}/source", "build", "-o", "../client", "."], environment=places)
            listed = [go, "-C", f"{folder}/source", "list", "-m", "-f", "{{.Dir}}", GO_MODULE]
            module = subprocess.check_output(listed, env={**os.environ, **places}, text=True).strip()
            _fill_go_examples(Path(module) / "example", folder / "source" / "examples")
            (folder / "examples").mkdir()
            run([go, "-C", f"{folder}/source", "build", "-o", "../examples/", "./examples/..."], environment=places)
            for place in ("path", "cache"):
                shutil.rmtree(folder / place)
    return [str(_CACHE / name / "client")]


def _fill_go_examples(packaged: Path, folder: Path) -> None:
    for source in packaged.rglob("main.go"):
        text = source.read_text().replace("const (", "var (", 1)
        constant = r'^(\s+)(Topic|Endpoint|ConsumerGroup|AccessKey|SecretKey|NameSpace)(\s+)= ".*"$'
        filled = re.sub(constant, lambda m: f'{m[1]}{m[2]} = os.Getenv("EXAMPLE_{m[2].upper()}")', text, flags=re.M)
        target = folder / source.parent.name
        target.mkdir(parents=True)
        (target / "main.go").write_text(filled)


def _build_rust() -> list[str]:
    """Build the program with the crate that its Cargo.toml names."""
    cargo = _find("cargo")
    sources = FOLDER / "rust" / "src" / "main.rs", FOLDER / "rust" / "Cargo.toml"
    name = f"rust-{_digest(*sources)}"
    with _made(name) as folder:
        if folder is not None:
            shutil.copytree(FOLDER / "rust", folder / "source")
            manifest = f"{folder}/source/Cargo.toml"
            described = [cargo, "metadata", "--format-version", "1", "--manifest-path", manifest]
            found = json.loads(
                subprocess.check_output(described, env={**os.environ, **_cargo_home()}, stderr=subprocess.DEVNULL)
            )
            (crate,) = [one["manifest_path"] for one in found["packages"] if one["name"] == "rocketmq"]
            (folder / "source" / "src" / "bin").mkdir()
            for example in RUST_EXAMPLES:
                text = (Path(crate).parent / "examples" / f"{example}.rs").read_text()
                filled = text.replace('"localhost:8081"', 'std::env::var("EXAMPLE_ENDPOINT").unwrap()')
                (folder / "source" / "src" / "bin" / f"{example}.rs").write_text(filled)
            run([cargo, "build", "--quiet", "--manifest-path", manifest], environment=_cargo_home())
            (folder / "examples").mkdir()
            built = folder / "source" / "target" / "debug"
            built.joinpath("rocketmqclient").rename(folder / "client")
            for example in RUST_EXAMPLES:
                built.joinpath(example).rename(folder / "examples" / example)
            shutil.rmtree(folder / "source")
    return [str(_CACHE / name / "client")]


def _cargo_home() -> dict[str, str]:
    """Return where cargo and its tool chain are: in the user's own home, which tests do not have."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    places = {"CARGO_HOME": home / ".cargo", "RUSTUP_HOME": home / ".rustup"}
    return {name: str(place) for name, place in places.items() if name not in os.environ and place.is_dir()}


_BUILDERS: dict[str, Callable[[], list[str]]] = {
    "python": _build_python,
    "node": _build_node,
    "java": _build_java,
    "go": _build_go,
    "rust": _build_rust,
}
LANGUAGES = tuple(_BUILDERS)


@cache
def command_of(language: str) -> list[str]:
    """Return the command of a language's program. Skips the test without its tool chain; fails where CI is set."""
    try:
        return _BUILDERS[language]()
    except FileNotFoundError as problem:
        text = f"the {language} client needs a tool chain: {problem}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)


def example_of(language: str, name: str) -> str:
    """Return the path of an example of the Go or the Rust package. Skips or fails as :func:`command_of`."""
    return str(Path(command_of(language)[0]).parent / "examples" / name)


def java_class_path() -> str:
    """Return the class path of the Java client. Skips or fails as :func:`command_of`."""
    command = command_of("java")
    return command[command.index("-cp") + 1]
