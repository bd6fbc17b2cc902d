"""What a plugin says of itself before anything heavy is imported, and whether it is true."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from core.config import EngineConfig, RolloutConfig, structure
from core.errors import ConfigError, Refused
from core.hookspecs import PROJECT
from core.manifest import ModelFacts
from core.memory import Load, Memory, Phase
from core.registry import EngineRegistry
from sdk.conformance.base import Conformance, gate

BASES: dict[str, type] = {"engine": EngineConfig, "rollout": RolloutConfig}  # what options extend
HEAVY = ("torch", "ray", "transformers", "vllm", "sglang", "megatron", "tensordict")

# Run in a process of its own: what listing and planning do, then what came of it.
LIST_AND_PLAN = """
import json, os, pkgutil, sys
module, config, planner, memory, shape, options, worlds, heavy = json.loads(sys.argv[1])
hooks = pkgutil.resolve_name(module)
for name in dir(hooks):
    if name == "manymesh_manifests":
        list(hooks.manymesh_manifests())
from core.config import structure
from core.errors import Refused
if config:
    cls = pkgutil.resolve_name(config)
read = []
if planner:
    made = structure(cls, options)
    plan = pkgutil.resolve_name(planner)
    class Watched(dict):
        def _saw(self, name):
            read.append(name)
        def __getitem__(self, name):
            self._saw(name)
            return super().__getitem__(name)
        def get(self, name, default=None):
            self._saw(name)
            return super().get(name, default)
        def __contains__(self, name):
            self._saw(name)
            return super().__contains__(name)
        def __iter__(self):
            self._saw("all of it")
            return super().__iter__()
    os.environ, kept = Watched(os.environ), os.environ
    for world in worlds:
        try:
            plan(made, world, None)
        except Refused:
            pass
    if memory:
        from core.memory import Load
        from core.model_facts import ModelFacts
        estimate = pkgutil.resolve_name(memory)
        for world in worlds:
            try:
                estimate(made, world, ModelFacts("model", shape["model_type"], shape), Load())
            except Refused:
                pass
    os.environ = kept
json.dump({"heavy": sorted(set(heavy) & set(sys.modules)), "environment": sorted(set(read))}, sys.stdout)
"""


# What an estimate is asked about where no model can be made, since that takes torch.
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def lacks_estimate(suite: type[Conformance]) -> str:
    """Why nothing is compared: a backend need not know what it will hold."""
    return "" if suite.manifest().memory else "the manifest names no `memory`"


def lacks_options(suite: type[Conformance]) -> str:
    """Why the options cannot be structured: the subclass gives none for what has no default."""
    names = {"model", *suite.config}
    required = [field.name for field in attrs.fields(suite.config_class()) if field.default is attrs.NOTHING]
    missing = [name for name in required if name not in names]
    return f"`config` lacks {', '.join(missing)}" if missing else ""


def is_ours(suite: type[Conformance]) -> str:
    """Why a package's imports are not looked at: manymesh's own parts and recipes import what plugins declare."""
    return "a part of manymesh" if suite.entry().distribution == PROJECT else ""


class ListedSuite(Conformance):
    """Of every kind of backend."""

    @classmethod
    def plain_options(cls) -> dict[str, Any]:
        """What the backend is built from, as it stands in YAML. Engines and rollouts have a model."""
        return {**({"model": "model"} if cls.kind in BASES else {}), **cls.config}

    def test_the_registry_lists_it_as_usable(self) -> None:
        backend = EngineRegistry.default().find(self.backend, self.kind, self.model_type, self.device)
        assert backend.manifest.summary, "the listing has one line for it: Manifest.summary"

    def test_listing_and_planning_import_nothing_heavy(self) -> None:
        heavy = self.listed_and_planned()["heavy"]
        assert heavy == [], f"importing {self.entry().module}, config and planner also imports {heavy}"

    def listed_and_planned(self) -> dict[str, list[str]]:
        def run() -> dict[str, list[str]]:
            entry, manifest = self.entry(), self.manifest()
            options = self.plain_options()
            paths = (entry.module, manifest.config, manifest.planner, manifest.memory)
            data = (*paths, SHAPE, options, self.worlds_used(), HEAVY)
            command = [sys.executable, "-c", LIST_AND_PLAN, json.dumps(data)]
            process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert process.returncode == 0, process.stderr
            answer: dict[str, list[str]] = json.loads(process.stdout)
            return answer

        return self.once((self.entry(), "listed and planned"), run)

    def test_what_it_requires_is_installed_in_a_version_that_it_names(self) -> None:
        for need in self.entry().needs():
            assert need.met, f"the manifest requires {' or '.join(need.any_of)}; installed: {need.installed}"
            requirements = [Requirement(text) for text in need.any_of]
            assert all(one.specifier or one.url for one in requirements), f"{need.any_of} names no version"

    @gate(is_ours)
    def test_its_package_imports_only_what_it_declares(self) -> None:
        """By the import statements of the factory's package: what is installed and not declared works by luck."""
        entry, manifest = self.entry(), self.manifest()
        package = manifest.factory.partition(":")[0].partition(".")[0]
        owner = importlib.metadata.metadata(entry.distribution)["Name"]
        declared = {Requirement(text).name for text in importlib.metadata.requires(owner) or ()}
        declared |= {Requirement(text).name for group in manifest.requires for text in group}
        dependencies = {canonicalize_name(name) for name in (*declared, owner, PROJECT)}
        homes = importlib.metadata.packages_distributions()
        undeclared = set()
        for top in imported_packages(package) - set(sys.stdlib_module_names):
            owners = {canonicalize_name(name) for name in homes.get(top, ())}
            if owners and not owners & dependencies:
                undeclared.add(f"{top} ({', '.join(sorted(owners))})")
        assert undeclared == set(), f"{owner} imports {sorted(undeclared)} and doesn't depend on them"


class ManifestSuite(ListedSuite):
    """Of every kind of backend that builds in a worker."""

    def test_the_planner_reads_no_environment(self) -> None:
        names = self.listed_and_planned()["environment"]
        assert names == [], f"the planner reads {names} of the environment, which differs between driver and workers"

    def test_its_options_have_types_and_defaults(self) -> None:
        """A transfer may ask for options that nobody can know, such as a directory."""
        cls = self.config_class()
        assert attrs.has(cls), f"{cls} is no attrs class"
        base = BASES.get(self.kind)
        if base is not None:
            problem = f"{cls.__name__} lacks the options that all have: extend core.config.{base.__name__}"
            assert issubclass(cls, base), problem
        for field in attrs.fields(cls):
            assert field.type is not None, f"option {field.name} has no type"
            if base is not None and field.name != "model":
                assert field.default is not attrs.NOTHING, f"option {field.name} has no default"

    @gate(lacks_options)
    def test_its_options_are_structured_from_plain_data_and_checked(self) -> None:
        cls = self.config_class()
        data = self.plain_options()
        config = structure(cls, data)
        assert structure(cls, data) == config
        with pytest.raises(ConfigError, match="sead"):
            structure(cls, {**data, "sead": 1})
        if self.kind in BASES:
            with pytest.raises(ConfigError, match="seed"):
                structure(cls, {**data, "seed": "one"})

    def test_its_factory_can_be_imported_and_called_as_the_registry_does(self) -> None:
        signature = inspect.signature(self.entry().load("factory"))
        several = {"model_type": None} if len(self.manifest().model_types) > 1 else {}
        signature.bind("config", device=self.device, **several)

    def test_the_planner_gives_the_same_answer_twice(self) -> None:
        for world_size in self.worlds_used():
            assert self.planned(world_size) == self.planned(world_size)

    def test_the_planner_refuses_a_world_of_no_ranks(self) -> None:
        if self.manifest().planner is not None:
            with pytest.raises(Refused):
                self.planned(0)

    @gate(lacks_estimate)
    def test_its_memory_is_estimated_for_every_phase_and_alike_when_asked_again(self) -> None:
        """On each device, on the worlds that the suite uses; not how near the truth it is, which no kit can know."""
        entry = self.entry()
        for world_size in self.worlds_used():
            for device in sorted(entry.manifest.devices):
                estimate = self.estimated(world_size, device)
                assert estimate == self.estimated(world_size, device)
                phases = {each.phase: each for each in estimate}
                assert len(phases) == len(estimate), "a phase is there once"
                working = Phase.TRAIN if self.kind == "engine" else Phase.GENERATE
                assert {Phase.IDLE, working} <= phases.keys()
                assert phases[Phase.IDLE].total <= phases[working].total
                numbers = [value for each in estimate for value in attrs.astuple(each)[1:]]
                assert all(isinstance(value, int) and value >= 0 for value in numbers), estimate
                if self.kind == "engine":
                    frozen = self.estimated(world_size, device, trainable=False)
                    assert Phase.TRAIN not in {each.phase for each in frozen}
                    assert not any(each.gradients or each.optimizer for each in frozen)

    def estimated(self, world_size: int, device: str, **options: Any) -> tuple[Memory, ...]:
        family, of_family = getattr(self, "family", "qwen3"), getattr(self, "model_options", {})
        facts = ModelFacts.read(self.model(family, **of_family))
        load = Load(device=device, device_bytes=80 * 2**30, prompt_tokens=256, row_tokens=512)
        return self.entry().memory({**self.plain_options(), **options}, world_size, facts, load)

    def test_the_planner_puts_every_rank_in_its_place(self) -> None:
        """Of each world that the suite uses, and of larger ones that the planner takes."""
        for world_size in sorted({*self.worlds_used(), 8, 16}):
            try:
                plan = self.planned(world_size)
            except Refused:
                assert world_size not in self.worlds_used()
                continue
            if plan is not None:
                plan.route.check("the plan's")
                assert len(plan.route.dp_ranks) == world_size
                for layout in (plan.layout, *plan.views.values()):
                    assert layout.world_size == world_size, f"layout {layout} is not of {world_size} ranks"


def imported_packages(package: str) -> set[str]:
    """Top-level names that a package's files import, lazily too; imports under `try` are optional ones."""
    spec: Any = importlib.util.find_spec(package)
    places = [Path(each) for each in spec.submodule_search_locations or ()] or [Path(spec.origin)]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    return {name.partition(".")[0] for file in files for name in imports_of(ast.parse(file.read_text()))} - {package}


def imports_of(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            yield child.module
        elif not isinstance(child, ast.Try):
            yield from imports_of(child)
