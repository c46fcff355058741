"""The house keeps its rules: who imports whom, what is documented, how long a file is, what the papers claim."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import django
import pytest
from django.conf import settings

import escrowmq

ROOT = Path(__file__).parent.parent
LAB = ROOT / "lab" / "src"
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *LAB.rglob("*.py")])
LONGEST = 600
"""Lines of a file: a signal that there may be two things in it."""
WIDEST = 15
"""Modules of one folder, ``cli`` aside: there each command has a file."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_follow_the_layers() -> None:
    """Every contract of pyproject.toml, with import-linter's own command."""
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_files_are_short() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length > LONGEST}


def test_folders_are_narrow() -> None:
    """Whoever opens a folder sees at once what lives there."""
    folders = {path.parent for path in SOURCES} - {ROOT / "src" / "escrowmq" / "cli"}
    modules = {relative(folder): len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert not {folder: count for folder, count in modules.items() if count > WIDEST}


def test_nothing_is_left_to_do() -> None:
    found = {
        relative(path): re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b", path.read_text())
        for path in SOURCES
    }
    assert not {path: words for path, words in found.items() if words}


def test_every_module_says_what_it_is() -> None:
    assert not [relative(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_room_is_called_utils() -> None:
    banned = {"utils", "util", "common", "helpers", "misc"}
    assert not [relative(p) for p in SOURCES if {p.stem, *p.parts} & banned]


def test_pyspark_and_sqlalchemy_stay_in_their_rooms() -> None:
    rooms = {
        "pyspark": {"pipeline", "spark"},
        "sqlalchemy": {"outbox", "handlers", "compensation", "pipeline", "overview", "testing", "django"},
    }
    for path in (path for path in SOURCES if not path.is_relative_to(LAB)):
        package, room = path.relative_to(ROOT / "src").parts[:2]
        room = room if package == "escrowmq" else package
        for name in imported(path):
            assert room in rooms.get(name, {room}), f"{relative(path)} imports {name}"


def test_assert_is_no_argument_check() -> None:
    """Without -O or with it, the same errors: no module raises AssertionError on purpose."""
    assert not [
        relative(p)
        for p in SOURCES
        if "raise AssertionError" in p.read_text() and not {"testing", "escrowmq_lab"} & set(p.parts)
    ]


def imported(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


# Public names


def public_modules() -> Iterator[ModuleType]:
    if not settings.configured:  # models exist only within a Django project
        names = ("admin", "auth", "contenttypes", "messages", "sessions")
        settings.configure(INSTALLED_APPS=[*(f"django.contrib.{name}" for name in names), "escrowmq.django"])
        django.setup()
    for module in pkgutil.walk_packages(escrowmq.__path__, "escrowmq."):
        if not module.name.endswith("__main__"):
            yield importlib.import_module(module.name)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Public functions, classes and the functions of public classes that a module defines without a docstring."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing) and not thing.__doc__:
            yield f"{module.__name__}.{name}"
        # what a dataclass makes by itself is no docstring
        if inspect.isclass(thing) and (not thing.__doc__ or thing.__doc__.startswith(f"{name}(")):
            yield f"{module.__name__}.{name}"


def test_public_functions_and_classes_are_documented() -> None:
    missing = [name for module in public_modules() for name in undocumented(module)]
    assert not missing


def exported() -> dict[str, object]:
    return {name: getattr(escrowmq, name) for name in escrowmq.__all__}


def test_what_is_exported_is_there_and_documented() -> None:
    assert len(set(escrowmq.__all__)) == len(escrowmq.__all__)
    names = exported()
    assert not [n for n, thing in names.items() if (inspect.isclass(thing) or callable(thing)) and not thing.__doc__]


def test_every_method_that_users_call_is_documented() -> None:
    missing = [
        f"{name}.{method}"
        for name, thing in exported().items()
        if inspect.isclass(thing)
        for method, function in vars(thing).items()
        if not method.startswith("_")
        and (inspect.isfunction(function) or isinstance(function, property))
        and not inspect.getdoc(function)
    ]
    assert not missing


# Papers

LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")
PAPERS = [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "GUARANTEES.md", "SECURITY.md")
] + sorted((ROOT / "docs").rglob("*.md"))


def test_links_lead_somewhere() -> None:
    targets = [(paper, target) for paper in PAPERS for target in LINK.findall(paper.read_text()) if "://" not in target]
    assert not [(relative(paper), target) for paper, target in targets if not (paper.parent / target).exists()]


def commands_in(paper: Path) -> list[list[str]]:
    """The words of every ``escrowmq ...`` line in the shell blocks of a paper."""
    found = []
    for block in re.findall(r"```(?:sh|console|bash)\n(.*?)```", paper.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].removeprefix("$ ").split()
            while words and ("=" in words[0] or words[0] in ("exec", "sudo")):
                words = words[1:]
            if words and words[0].removeprefix(".venv/bin/") == "escrowmq":
                found.append(words[1:])
    return found


def test_commands_in_the_papers_exist() -> None:
    """Every command named in a paper parses: the command is there and so is each long option."""
    import typer.main

    from escrowmq.cli.main import app

    escrowmq_command = typer.main.get_command(app)
    for words in [words for paper in PAPERS for words in commands_in(paper)]:
        command = escrowmq_command
        rest = list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
        assert not getattr(command, "commands", None), f"{words}: no such command"
        options = {option for p in command.params for option in [*p.opts, *p.secondary_opts]} | {"--help"}
        assert not [w for w in rest if w.startswith("--") and w.split("=")[0] not in options], words


def test_make_targets_in_the_papers_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for paper in PAPERS for name in re.findall(r"^\s*make ([a-z]+)", paper.read_text(), re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_python_in_the_papers_compiles() -> None:
    for paper in PAPERS:
        for block in re.findall(r"```python\n(.*?)```", paper.read_text(), re.DOTALL):
            compile(block, relative(paper), "exec")


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {p.name for p in (ROOT / "src" / "escrowmq").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert not [room for room in rooms if f"`{room}/`" not in text]


def test_every_function_of_a_round_is_where_the_page_says() -> None:
    """docs/round.md names functions and files in turn; each function is defined in one of the files of its row."""
    text = (ROOT / "docs" / "round.md").read_text()
    named = 0
    for piece in text.splitlines():
        files = [ROOT / "src" / "escrowmq" / name for name in re.findall(r"`([a-z_/]+\.py)`", piece)]
        for function in re.findall(r"`([A-Z]\w+\.\w+|blocking|arrange|checked|check_batch)`", piece):
            assert any(defines(file, function) for file in files), f"{function} is in none of {files}"
            named += 1
    assert named > 30


def defines(file: Path, name: str) -> bool:
    """Whether a file defines a function, or a class with a function of that name."""
    holder, _, function = name.rpartition(".")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not holder and node.name == function:
            return True
        if isinstance(node, ast.ClassDef) and node.name == holder:
            return any(isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) and x.name == function for x in node.body)
    return False


def test_the_command_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "escrowmq", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "escrowmq 0.2.0")


@pytest.mark.parametrize(("root", "name"), [(ROOT, "escrowmq"), (ROOT / "lab", "escrowmq_lab")])
def test_files_that_are_not_python_are_packaged(root: Path, name: str) -> None:
    """What a distribution reads beside its modules is there after an installation, too."""
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][name]
    package = root / "src" / name
    packaged = {path for pattern in wanted for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".py"}
    others = {path for path in others if path.parent.name != "__pycache__"}  # other tests may be writing there
    assert not sorted(map(relative, others - packaged))
    assert not [pattern for pattern in wanted if not any(package.glob(pattern))]


def test_the_product_has_no_laboratory() -> None:
    """What proves and measures it is a distribution of its own: users do not install it."""
    package = ROOT / "src" / "escrowmq"
    assert not {"chaos", "simulation"} & {path.name for path in package.iterdir()}
    assert not [relative(path) for path in package.rglob("*pom.xml")]


def test_arrow_flight_is_gone() -> None:
    """docs/decisions/0063-one-connection.md"""
    imports = re.compile(
        r"^\s*(?:from pyarrow import .*\bflight\b|import pyarrow\.flight|from pyarrow\.flight)", re.MULTILINE
    )
    assert [relative(path) for path in SOURCES if imports.search(path.read_text())] == []
