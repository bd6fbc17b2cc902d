"""What a new plugin is called, everywhere, from the one name that its author gives."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Literal

import attrs
from packaging.utils import canonicalize_name

from core.errors import Refused
from core.hookspecs import PROJECT
from core.registry import EngineRegistry, Entry

Kind = Literal["engine", "rollout", "transfer", "dispatch_mode"]
# PEP 508's names. Longer ones would not fit the lines of the templates, nor anybody's fingers.
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
LONGEST = 40


@attrs.frozen
class Names:
    """Of one plugin.

    Attributes:
        distribution: what pip installs, normalised: "my-engine".
        package: what Python imports: "my_engine".
        backend: what users ask for: the distribution's name without a leading "manymesh-".
        cls: the class: "MyEngine". It ends with the kind.
    """

    kind: Kind
    distribution: str
    package: str
    backend: str
    cls: str

    @classmethod
    def of(cls, name: str, kind: Kind) -> Names:
        """Raises Refused for what is no name of a distribution, or of no package that Python can import."""
        if not _NAME.fullmatch(name) or len(name) > LONGEST:
            raise Refused(
                f"{name!r} cannot be the name of a distribution",
                have=repr(name),
                want=f"letters and digits, with '-', '_' or '.' between, {LONGEST} characters at most",
                mend=f"for example {_suggestion(name, kind)!r}",
            )
        distribution = canonicalize_name(name)
        package = distribution.replace("-", "_")
        if not package.isidentifier() or keyword.iskeyword(package):
            raise Refused(
                f"Python cannot import a package called {package!r}",
                have=repr(name),
                want="a name that begins with a letter and is no keyword",
                mend=f"for example {_suggestion(name, kind)!r}",
            )
        backend = distribution.removeprefix(f"{PROJECT}-") or distribution
        stem = "".join(word.capitalize() for word in backend.split("-"))
        if not stem.isidentifier():  # manymesh-3d
            stem = f"Manymesh{stem}"
        suffix = camel_case(kind)
        return cls(kind, distribution, package, backend, stem if stem.endswith(suffix) else stem + suffix)

    def check_free(self, entries: Iterable[Entry] | None = None) -> None:
        """See that nothing installed has any of these names.

        Args:
            entries: what is installed; None: looked up.

        Raises:
            Refused: naming who has it.
        """
        mend = "choose another name"
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            pass
        else:
            raise Refused(
                f"a distribution {self.distribution!r} is installed already",
                have=f"{self.distribution} {version}",
                mend=f"{mend}, or pip uninstall {self.distribution}",
            )
        if self.package in sys.stdlib_module_names:
            raise Refused(f"{self.package!r} is a module of Python's own", mend=mend)
        if (spec := importlib.util.find_spec(self.package)) is not None:
            places = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
            raise Refused(f"`import {self.package}` finds something already", have=", ".join(places), mend=mend)
        for entry in EngineRegistry.default().entries if entries is None else entries:
            if (entry.kind, entry.name) == (self.kind, self.backend):
                article = "an" if self.kind == "engine" else "a"
                raise Refused(
                    f"there is {article} {self.kind} {self.backend!r} already: users would have to say which they mean",
                    have=str(entry),
                    mend=mend,
                )


def camel_case(kind: Kind) -> str:
    return "".join(word.capitalize() for word in kind.split("_"))


def _suggestion(name: str, kind: Kind) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    stem = "-".join(words)[: LONGEST - 3].strip("-") or kind
    return stem if len(words) > 1 and stem[0].isalpha() else f"my-{stem}"
