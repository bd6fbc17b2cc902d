"""The rules of the house: which room may import which, what core may know, and how large it may grow."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.lazy import typed_imports

ROOT = Path(__file__).parent.parent
PLUGINS = sorted([*ROOT.glob("plugins/*/manymesh_*"), *ROOT.glob("sdk/scaffold/template_*/manymesh_*")])
# Published names of backends; `hf` only as a whole word.
BACKENDS = re.compile(r"fsdp|megatron|vllm|sglang|(?<![a-z0-9])hf(?![a-z0-9])", re.IGNORECASE)
HEAVY = {"torch", "ray", "vllm", "sglang", "megatron", "transformers", "tensordict"}


def sources(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*.py") if "tests" not in file.relative_to(folder).parts)
    assert files, f"{folder} holds no Python file"
    return files


def imports(file: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, lazily too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        (ROOT / "core", {"manymesh", "sdk", "tests"}),
        (ROOT / "manymesh", {"sdk", "tests"}),
        (ROOT / "manymesh/parts", {"manymesh", "sdk", "tests"}),
        (ROOT / "manymesh/workers", {"manymesh.recipes", "manymesh.replay", "sdk", "tests"}),
        (ROOT / "sdk", {"tests"}),
        *((plugin, {"manymesh", "sdk", "tests"}) for plugin in PLUGINS),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_imports_point_one_way(folder: Path, others: set[str]) -> None:
    """manymesh.parts imports core alone; plugins import core and the parts; the workers know no recipe; sdk is on top;
    nobody imports a plugin by its name."""
    forbidden = others | {plugin.name for plugin in PLUGINS if plugin != folder}
    open_to_all = {"manymesh.parts"} if folder == ROOT / "manymesh/parts" or folder in PLUGINS else set()
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources(folder)
        for name in imports(file)
        if within(name, forbidden) and not within(name, open_to_all)
    ]
    assert wrong == []


def test_the_rule_on_imports_tells_a_room_from_its_neighbour(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from manymesh import parts, workers\nfrom manymesh.parts.x import y\nimport sdkx, manymesh.parts_of\n"
    )
    names = list(imports(file))
    assert [name for name in names if not within(name, {"manymesh.parts"})] == [
        "manymesh.workers",
        "sdkx",
        "manymesh.parts_of",
    ]
    assert [name for name in names if not within(name, {"manymesh"})] == ["sdkx"]


def modules_of(*folders: Path) -> dict[str, Path]:
    """Files by module name; a folder is a package at the top."""
    return {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for folder in folders
        for file in sources(folder)
        if not any(part.startswith("template_") for part in file.relative_to(folder).parts)
    }


def arrows(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Which modules each one imports, lazily and for type checkers too."""
    return {
        name: ({own if own in modules else own.rpartition(".")[0] for own in imports(file)} & modules.keys()) - {name}
        for name, file in modules.items()
    }


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        names: set[str] = set()
        stack = [start]
        while stack:
            for name in graph[stack.pop()] - names:
                names.add(name)
                stack.append(name)
        return names

    reach = {name: reached(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions and for type checkers count."""
    modules = modules_of(ROOT / "core", ROOT / "manymesh", ROOT / "sdk", *PLUGINS)
    assert {"core.group", "manymesh_fsdp.engine", "sdk.testing", "core"} <= modules.keys()
    assert cycles(arrows(modules)) == set()


def test_no_room_of_core_has_an_arrow_back() -> None:
    """A room is a public module, or a package: what is within one may change without a look at the others."""
    modules = arrows(modules_of(ROOT / "core"))
    rooms: dict[str, set[str]] = {}
    for module, imported in modules.items():
        if module != "core":
            rooms.setdefault(_room(module), set()).update(_room(name) for name in imported if name != "core")
    assert cycles({room: others - {room} for room, others in rooms.items()}) == set()


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_the_rule_on_cycles_sees_lazy_imports_and_those_for_type_checkers(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from house import b\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.c import C\n")
    (package / "c.py").write_text("import house.a\n")
    (package / "d.py").write_text("import house.a\nfrom house import c\n")
    graph = arrows(modules_of(package))
    assert graph["house.d"] == {"house.a", "house.c"}
    assert cycles(graph) == {frozenset({"house.a", "house.b", "house.c"})}


# Outside core, only these look into its private rooms: tests of those rooms, and what is still to be mended.
TESTS_OF_ROOMS = {
    "tests/test_batch.py",
    "tests/test_dealing.py",
    "tests/test_futures.py",
    "tests/test_memory_pool.py",
    "tests/test_observe.py",
    "tests/test_ray.py",
    "tests/test_register.py",
    "tests/test_shards.py",
    "tests/test_workers.py",
}
KNOWN_INTRUDERS = {"plugins/megatron/tests/megatron_steps.py"}


def test_nobody_outside_core_imports_its_private_rooms() -> None:
    folders = ("manymesh", "sdk", "plugins", "benchmarks", "examples", "scripts", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    looking_in = {
        str(file.relative_to(ROOT)) for file in files if any(name.startswith("core._") for name in imports(file))
    }
    assert looking_in - TESTS_OF_ROOMS - KNOWN_INTRUDERS == set()
    assert (TESTS_OF_ROOMS | KNOWN_INTRUDERS) - looking_in == set(), "no longer true: remove from the list"


def words(file: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of a file's code, with their lines; prose (docstrings, comments) is left out."""
    tree = ast.parse(file.read_text())
    prose = set()
    for node in ast.walk(tree):
        # A string that stands by itself is a docstring, be it of a module, a class, a function or an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.lineno, node.value
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), value


def test_core_names_no_backend() -> None:
    places = [
        f"{file.relative_to(ROOT)}:{line}: {word}"
        for file in sources(ROOT / "core")
        for line, word in words(file)
        if BACKENDS.search(word)
    ]
    assert places == []


def test_the_rule_on_backend_names_bites(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text('"""FSDP is prose."""\nimport manymesh_hf\nname = "vllm"\nshelf = megatron_args = 1\n')
    assert [line for line, word in words(file) if BACKENDS.search(word)] == [2, 3, 4]
    assert sorted(imports(file)) == ["manymesh_hf"]


# What a newcomer reads to follow one call, in that order.
WAY_OF_A_CALL = (
    "errors mesh columns loss engine rollout transfer worker dispatch"
    " _calls/call _calls/deal _calls/join _rows/shards _rows/table _run/build _run/method _run/transport group"
)


def test_the_way_of_a_call_can_be_read() -> None:
    """No file of core is above 400 lines; and what one must read to follow a call has an upper bound in lines of code
    (docstrings, comments and blank lines are not counted)."""
    assert {file.name for file in sources(ROOT / "core") if len(file.read_text().splitlines()) > 400} == set()
    assert sum(lines_of_code(ROOT / f"core/{name}.py") for name in WAY_OF_A_CALL.split()) <= 1640


def lines_of_code(file: Path) -> int:
    text = file.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                docs |= set(range(first.lineno, first.end_lineno + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in skip for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - docs)


def test_a_plugins_package_is_empty_so_that_listing_it_imports_nothing_heavy() -> None:
    assert PLUGINS
    for plugin in PLUGINS:
        assert (plugin / "__init__.py").read_text().strip() == ""


def test_importing_core_and_what_lists_and_plans_imports_nothing_heavy() -> None:
    modules = (
        "core, core.registry, core.list_engines, core.group, core.hookspecs, core.config, core.manifest, core.mesh"
    )
    script = f"import sys, {modules}; sys.exit(sorted({HEAVY} & set(sys.modules)) or 0)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_every_public_name_of_core_has_a_home() -> None:
    """Read off the source: importing them all would import torch and ray."""
    for name, (home, _) in typed_imports("core").items():
        path = ROOT / home.replace(".", "/")
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        tree = ast.parse(file.read_text())
        defined = {getattr(node, "name", None) for node in tree.body}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in node.names}
        assert name in defined, f"{home} does not define {name}"
