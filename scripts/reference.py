"""Write docs/reference.md from core's public names and manymesh.parts, by their sources: `python -m scripts.reference`.

What is described is not imported, so the page doesn't depend on what is installed. A test sees that it is up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from core.lazy import typed_imports

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference.md"
WHOLE_MODULES = ("core.columns", "core.batch", "core.device")  # used as modules: `from core.batch import to_padded`
SECTIONS = re.compile(r"(Args|Attributes|Returns|Raises|Example|Yields):$")
INTRO = """\
# Reference

Core's public names, as `from core import Engine`, and the parts that backends share, as
`from manymesh.parts.adamw import ScheduledAdamW`. Made from the docstrings by `make docs`. What the columns
of a batch mean is under [core.columns](#corecolumns).
"""


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")


def page() -> str:
    """The whole page."""
    parts = [INTRO, "## Core\n"]
    for home, names in core_names().items():
        parts += module(home, names)
    for home in WHOLE_MODULES:
        parts += module(home, None)
    parts.append("## Parts\n")
    for file in sorted((ROOT / "manymesh/parts").glob("[a-z]*.py")):
        parts += module(f"manymesh.parts.{file.stem}", None)
    return "\n".join(parts).rstrip() + "\n"


def core_names() -> dict[str, list[str]]:
    """core's public names by the modules that they come from, as core/__init__.py has them."""
    names: dict[str, list[str]] = {}
    for name, (home, _) in typed_imports("core").items():
        names.setdefault(home, []).append(name)
    return names


def module(name: str, names: list[str] | None) -> Iterator[str]:
    """A module's docstring and its public names, all of them where none are given."""
    body = tree(name)
    yield f"### {name}\n"
    if text := ast.get_docstring(body):
        yield prose(text) + "\n"
    public = [
        node.name
        for node in body.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    public += [  # `from x import y as y` says that y is offered here
        alias.name
        for node in body.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    for each in names if names is not None else public:
        home, node = find(name, each)
        yield f"#### {each}\n"
        if isinstance(node, ast.ClassDef):
            yield from described_class(node, source(home))
        elif isinstance(node, ast.FunctionDef):
            yield from described_function(node)
        else:
            yield f"```python\n{ast.unparse(node)}\n```\n"


def find(module_name: str, name: str) -> tuple[str, ast.stmt]:
    """Where a name is defined, which may be in another module that the first one imports it from. Of an overloaded
    function the one that runs: it has the docstring."""
    for node in tree(module_name).body:
        is_overload = any(ast.unparse(each) == "overload" for each in getattr(node, "decorator_list", []))
        if getattr(node, "name", None) == name and not is_overload:
            return module_name, node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return module_name, node
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return find(node.module, name)
    raise LookupError(f"{module_name} does not define {name}")


def described_class(node: ast.ClassDef, text: str) -> Iterator[str]:
    """A stub of the class, its docstring, and what its methods' docstrings say."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    stub = [f"class {node.name}({bases}):" if bases else f"class {node.name}:"]
    docs = []
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            made_known = each.name == "__init__" or not each.name.startswith("_")
            if not made_known or any("setter" in ast.unparse(decorator) for decorator in each.decorator_list):
                continue
            stub += [f"    {line}" for line in signature(each)]
            if doc := ast.get_docstring(each):
                docs.append(f"`{each.name}`: {prose(doc)}\n")
        elif field := attribute(each, text.splitlines()):
            stub.append(f"    {field}")
    if len(stub) == 1:
        stub[0] += " ..."
    yield "\n".join(["```python", *stub, "```\n"])
    if doc := ast.get_docstring(node):
        yield prose(doc) + "\n"
    yield from docs


def attribute(node: ast.stmt, lines: list[str]) -> str | None:
    """A field or an enumeration's member, with the comment behind it."""
    target: ast.expr
    if isinstance(node, ast.AnnAssign):
        target = node.target
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
    else:
        return None
    if not isinstance(target, ast.Name) or target.id.startswith("_"):
        return None
    comment = re.search(r"\s# (.*)$", lines[(node.end_lineno or node.lineno) - 1])
    return ast.unparse(node) + (f"  # {comment.group(1)}" if comment else "")


def described_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    yield "\n".join(["```python", *signature(node), "```\n"])
    if doc := ast.get_docstring(node):
        yield prose(doc) + "\n"


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The lines of a stub, one argument a line where it is long."""
    kinds = {ast.unparse(each) for each in node.decorator_list} & {"property", "classmethod", "staticmethod"}
    bare = type(node)(name=node.name, args=node.args, body=[], decorator_list=[], returns=node.returns, lineno=0)
    flat = ast.unparse(bare).strip() + " ..."
    lines = [f"@{kind}" for kind in sorted(kinds)]
    if len(flat) <= 110:
        return [*lines, flat]
    args = node.args
    inner = [ast.unparse(ast.arguments([], [each], None, [], [], None, [])) for each in args.args]
    inner[len(inner) - len(args.defaults) :] = [
        f"{name} = {ast.unparse(value)}"
        for name, value in zip(inner[len(inner) - len(args.defaults) :], args.defaults, strict=True)
    ]
    if args.vararg or args.kwonlyargs:
        inner.append(f"*{ast.unparse(args.vararg)}" if args.vararg else "*")
    for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        inner.append(ast.unparse(each) + (f" = {ast.unparse(value)}" if value else ""))
    if args.kwarg:
        inner.append(f"**{ast.unparse(args.kwarg)}")
    head, end = flat.partition("(")[0], f") -> {ast.unparse(node.returns)}: ..." if node.returns else "): ..."
    return [*lines, f"{head}(", *(f"    {each}," for each in inner), end]


def prose(text: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    out: list[str] = []
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        if match := SECTIONS.match(line):
            section = match.group(1)
            out += ["", f"**{section}**", ""]
        elif section and line and not line.startswith(" "):
            section = ""
            out += ["", line]
        elif section == "Example":
            out.append(f"    {line[4:]}" if line.strip() else "")
        elif section in ("Args", "Attributes", "Raises") and re.match(r" {4}[\w*][\w, .*]*: ", line):
            name, _, rest = line.strip().partition(": ")
            out.append(f"- `{name}`: {rest}")
        elif section in ("Args", "Attributes", "Raises") and line.strip():
            out.append(f"  {line.strip()}")
        else:
            out.append(line.strip() if section else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def path(name: str) -> Path:
    here = ROOT / name.replace(".", "/")
    return here / "__init__.py" if here.is_dir() else here.with_suffix(".py")


def source(name: str) -> str:
    return path(name).read_text()


def tree(name: str) -> ast.Module:
    return ast.parse(source(name))


if __name__ == "__main__":
    main()
