"""Writing a new distribution from a template, by the names in it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core.errors import Refused
from sdk.scaffold.names import Names, camel_case

CACHES = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
# Under their own names these would rule the template itself.
DOTTED = {"gitignore": ".gitignore", "github": ".github"}


def template(kind: str) -> Path:
    return Path(__file__).parent / f"template_{kind}"


def render(names: Names) -> Iterator[tuple[Path, str]]:
    """The files of a new distribution: their paths in it, and what is in them."""
    dashed = names.kind.replace("_", "-")
    in_template = {
        f"manymesh-template-{dashed}": names.distribution,
        f"manymesh_template_{names.kind}": names.package,
        f"template-{dashed}": names.backend,
        f"Template{camel_case(names.kind)}": names.cls,
    }
    # All in one pass: what was put in is not looked at again. The longest come first.
    pattern = re.compile("|".join(map(re.escape, in_template)))

    def named(text: str) -> str:
        return pattern.sub(lambda match: in_template[match.group()], text)

    root = template(names.kind)
    for file in sorted(root.rglob("*")):
        inside = file.relative_to(root)
        if file.is_file() and not CACHES & set(inside.parts):
            yield Path(*(DOTTED.get(part, named(part)) for part in inside.parts)), named(file.read_text())


def generate(names: Names, directory: Path) -> list[Path]:
    """Make the distribution in `directory`, which must not be there, or be empty; it appears as a whole.

    Returns:
        the files, in the directory.

    Raises:
        Refused: something is in the directory, or it cannot be written.
    """
    directory = directory.absolute()
    try:
        inside = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
        if inside or (directory.exists() and not directory.is_dir()):
            raise Refused(
                f"{str(directory)!r} is {'not empty' if inside else 'a file'}",
                have=", ".join(inside[:8]) or None,
                mend="choose another directory with --dir, or move away what is there",
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            files = []
            for inner, text in render(names):
                file = aside / inner
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                files.append(directory / inner)
            aside.chmod(0o755)
            os.replace(aside, directory)  # onto an empty directory too
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except OSError as error:
        raise Refused(
            f"cannot write to {str(directory)!r}: {error.strerror or error}",
            have=error,
            mend="choose another directory with --dir",
        ) from error
    return files
