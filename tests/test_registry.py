"""What the registry makes of installed, broken, doubled and hidden plugins, and how a backend is asked for."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import core
from core.errors import ConfigError, Refused, RegistryError
from core.registry import Backend, Choice, EngineRegistry, Entry, Status, hidden_packages
from tests.fake_distributions import BACKEND, HEADER, forget, install, manifest, plugin


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site-packages of the test's own, first on sys.path; what was imported from it is forgotten again."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget(tmp_path)


def discovered(**env: str) -> EngineRegistry:
    importlib.invalidate_caches()
    return EngineRegistry.discover(env)


def entries(distribution: str, **env: str) -> list[Entry]:
    return [entry for entry in discovered(**env).entries if entry.distribution == distribution]


def only(distribution: str, **env: str) -> Entry:
    (entry,) = entries(distribution, **env)
    return entry


def install_toy(site: Path, name: str = "toy", distribution: str = "acme-toy", **more: object) -> None:
    """A whole plugin: light module, and a backend module that counts as heavy."""
    module = distribution.replace("-", "_")
    sources = {f"{module}.py": plugin(manifest(name, module, **more)), f"{module}_backend.py": BACKEND}
    install(site, distribution, sources)


# --- finding -------------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_and_nothing_of_its_backend_is_imported(site: Path) -> None:
    install_toy(site, summary="a toy")
    entry = only("acme-toy")
    assert (entry.kind, entry.name, entry.status, entry.version) == ("engine", "toy", Status.OK, "1.0")
    assert isinstance(entry, Backend)
    assert entry.manifest.summary == "a toy"
    assert "acme_toy" in sys.modules
    assert "acme_toy_backend" not in sys.modules


def test_entries_are_ordered_by_name_whatever_the_order_on_the_path(site: Path) -> None:
    for name in ("m", "a", "z"):
        install_toy(site, name=name, distribution=f"acme-{name}")
    names = [entry.name for entry in discovered().entries]
    assert names == sorted(names)
    assert {"a", "m", "z"} <= set(names)


def test_distribution_names_are_normalised(site: Path) -> None:
    install(site, "Acme_Toy", {"acme_toy.py": plugin(manifest("toy", "acme_toy"))})
    assert only("acme-toy").status is Status.OK


BROKEN = {
    "raise ImportError('no libfoo.so')": "ImportError: no libfoo.so",
    "import a_module_nobody_has": "ModuleNotFoundError: No module named 'a_module_nobody_has'",
    "raise RuntimeError('needs a driver')": "RuntimeError: needs a driver",
    "def f(:\n": "SyntaxError: ",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "class Panic(BaseException): pass\nraise Panic('at the extension')": "Panic: at the extension",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E": "E: (its text cannot be shown)",
    "": "RegistryError: it offers no manifest",
    HEADER + "@hookimpl\ndef manymesh_manifest(): return []\n": "PluginValidationError: unknown hook",
    HEADER + "@hookimpl\ndef manymesh_manifests(): raise KeyError('x')\n": "KeyError: 'x'",
    HEADER + "@hookimpl\ndef manymesh_manifests():\n    yield from 1/0\n": "ZeroDivisionError: ",
    plugin("{'name': 'toy'}"): "RegistryError: its hook gives a dict, not a Manifest",
    plugin(manifest("toy", "m", factory="m")): "Refused: a manifest's factory names an object as 'module:object'",
    plugin(manifest("toy", "m", requires=("torch>=2",))): "Refused: a manifest's requires is a tuple of groups",
    plugin(manifest("toy", "m", requires=((">=2",),))): "InvalidRequirement: ",
    plugin(manifest("dist:toy", "m")): "ValueError: ",
}


@pytest.mark.parametrize(
    ("source", "message"), BROKEN.items(), ids=[message.split(":")[0] for message in BROKEN.values()]
)
def test_a_broken_plugin_is_listed_with_its_error_and_hurts_nobody_else(site: Path, source: str, message: str) -> None:
    install(site, "broken-toy", {"broken_toy.py": source}, version="7.1", points={"brk": "broken_toy"})
    install_toy(site)
    registry = discovered()

    (broken,) = [entry for entry in registry.entries if entry.distribution == "broken-toy"]
    assert (broken.status, broken.kind, broken.name, broken.version) == (Status.BROKEN, None, "brk", "7.1")
    assert broken.reason.startswith(message)
    assert "broken-toy" in broken.mend
    assert registry.find("toy").status is Status.OK
    for name in ("brk", "broken-toy", "broken-toy:anything"):
        with pytest.raises(RegistryError, match=r"broken-toy 7\.1 is broken") as raised:
            registry.find(name)
        assert raised.value.__cause__ is broken.error
        assert raised.value.mend == broken.mend


def test_a_keyboard_interrupt_is_the_users_and_not_the_plugins(site: Path) -> None:
    install(site, "broken-toy", {"broken_toy.py": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discovered()


def test_metadata_that_is_nonsense_is_listed_where_it_is_ours_and_ignored_where_not(site: Path) -> None:
    ours = install(site, "broken-toy", {"broken_toy.py": ""})
    (ours / "entry_points.txt").write_text("[manymesh.v1]\nno equals sign\n")
    leftover = install(site, "gone-toy", {"gone_toy.py": ""})
    (leftover / "METADATA").unlink()
    binary = install(site, "binary-toy", {"binary_toy.py": ""})
    (binary / "entry_points.txt").write_bytes(b"[manymesh.v1]\n\xff = x\n")
    install_toy(site)
    assert only("broken-toy").status is Status.BROKEN
    assert not entries("binary-toy")
    assert only("acme-toy").status is Status.OK


def test_a_plugin_of_another_api_is_incompatible_and_not_imported(site: Path) -> None:
    install(site, "next-toy", {"next_toy.py": "raise RuntimeError"}, group="manymesh.v2", points={"next": "next_toy"})
    entry = only("next-toy")
    assert (entry.status, entry.name) == (Status.INCOMPATIBLE, "next")
    assert entry.reason == "speaks plugin API 2, this core speaks 1"
    assert entry.mend == "pip install --upgrade manymesh"
    assert "next_toy" not in sys.modules
    with pytest.raises(RegistryError, match="incompatible: speaks plugin API 2"):
        discovered().find("next")


def test_a_plugin_that_speaks_several_apis_is_used_by_ours(site: Path) -> None:
    info = install(site, "acme-toy", {"acme_toy.py": plugin(manifest("toy", "acme_toy"))})
    with (info / "entry_points.txt").open("a") as file:
        file.write("[manymesh.v2]\ntoy = acme_toy_v2\n")
    assert only("acme-toy").status is Status.OK


def test_manymesh_plugins_limits_what_is_imported(site: Path) -> None:
    install_toy(site)
    install_toy(site, name="other", distribution="acme-other")
    registry = discovered(MANYMESH_PLUGINS=" Acme_Toy ,")
    assert registry.find("toy").status is Status.OK
    assert "acme_other" not in sys.modules
    with pytest.raises(RegistryError, match="disabled: MANYMESH_PLUGINS leaves it out") as raised:
        registry.find("acme-other")
    assert "add acme-other to MANYMESH_PLUGINS" in raised.value.mend


def test_an_empty_manymesh_plugins_loads_none(site: Path) -> None:
    install_toy(site)
    assert {entry.status for entry in discovered(MANYMESH_PLUGINS="").entries} == {Status.DISABLED}
    assert "acme_toy" not in sys.modules


def test_a_name_in_manymesh_plugins_that_is_not_installed_is_listed(site: Path) -> None:
    install_toy(site)
    entry = only("acme-toi", MANYMESH_PLUGINS="acme-toi")
    assert entry.status is Status.BROKEN
    assert "no plugin of this name is installed" in entry.reason
    assert entry.mend == "did you mean 'acme-toy'?"


def test_of_a_distribution_that_is_there_twice_the_first_on_the_path_counts(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "acme-toy", {"acme_toy.py": plugin(manifest("old", "acme_toy"))})
    front = site.parent / "front"
    install(front, "Acme.Toy", {"acme_toy.py": plugin(manifest("new", "acme_toy"))}, version="2.0")
    monkeypatch.syspath_prepend(str(front))
    entry = only("acme-toy")
    assert (entry.name, entry.version) == ("new", "2.0")

    install(site, "acme-quiet", {"acme_quiet.py": plugin(manifest("quiet", "acme_quiet"))})
    install(front, "acme-quiet", {}, version="2.0", points={}, group="console_scripts")
    assert entries("acme-quiet") == [], "version 2.0, which counts, offers nothing"


# --- requirements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requires", "reason", "mend"),
    [
        ((("pluggy>=1",),), "", ""),
        ((("nobody-has-this", "pluggy>=1"),), "", ""),
        ((("nobody-has-this; python_version < '3'",),), "", ""),
        ((("dep-toy>=2",),), "", ""),
        ((("dep-toy>=3",),), "needs dep-toy>=3: dep-toy is 2.1.dev0+local", "pip install 'dep-toy>=3'"),
        (
            (("pluggy",), ("nobody-has-this>=1", "nor-this"), ("dep-toy<2",)),
            "needs nobody-has-this>=1 or nor-this: nobody-has-this is not installed, nor-this is not installed;"
            " needs dep-toy<2: dep-toy is 2.1.dev0+local",
            "pip install 'nobody-has-this>=1' 'dep-toy<2'",
        ),
    ],
)
def test_requirements_are_all_of_groups_of_any_of(
    site: Path, requires: tuple[tuple[str, ...], ...], reason: str, mend: str
) -> None:
    install(site, "dep-toy", {}, version="2.1.dev0+local", points={})
    install_toy(site, requires=requires)
    entry = only("acme-toy")
    assert entry.status is (Status.MISSING_DEPENDENCY if reason else Status.OK)
    assert (entry.reason, entry.mend) == (reason, mend)
    if reason:
        with pytest.raises(RegistryError, match="missing-dependency: needs") as raised:
            discovered().find("toy")
        assert raised.value.mend == mend


def test_a_backend_for_workers_elsewhere_may_lack_here_what_it_requires(site: Path) -> None:
    install_toy(site, requires=(("nobody-has-this",),))
    with pytest.raises(RegistryError, match="missing-dependency"):
        discovered().find("toy")
    assert discovered().find("toy", elsewhere=True).status is Status.MISSING_DEPENDENCY


# --- shadows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["acme_toy/__init__.py", "acme_toy.py"])
def test_a_users_folder_or_file_that_hides_a_plugin_is_named_and_not_imported(
    site: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    install(site, "acme-toy", {"acme_toy/__init__.py": "", "acme_toy/manifest.py": plugin(manifest("toy", "m"))})
    (site / "acme_toy-1.0.dist-info/entry_points.txt").write_text("[manymesh.v1]\ntoy = acme_toy.manifest\n")
    assert only("acme-toy").status is Status.OK
    for name in ("acme_toy", "acme_toy.manifest"):
        del sys.modules[name]

    user = site.parent / "user"
    (user / file).parent.mkdir(parents=True)
    (user / file).write_text("raise RuntimeError('not imported')")
    monkeypatch.syspath_prepend(str(user))
    entry = only("acme-toy")
    intruder = user / file.removesuffix("/__init__.py")
    assert (entry.status, entry.name) == (Status.SHADOWED, "toy")
    assert entry.reason == f"{intruder} would be imported, which is not part of acme-toy"
    assert str(intruder) in entry.mend
    with pytest.raises(RegistryError, match="is shadowed"):
        discovered().find("toy")


def editable(project: Path) -> str:
    return json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})


def test_an_editable_install_is_at_home_where_its_pth_file_points(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = site.parent / "a project"
    (project / "src").mkdir(parents=True)
    (project / "src/acme_toy.py").write_text(plugin(manifest("toy", "acme_toy")))
    pth = {"_acme_toy.pth": f"{project / 'src'}\n"}
    install(site, "acme-toy", pth, points={"toy": "acme_toy"}, direct_url=editable(project))
    monkeypatch.syspath_prepend(str(project / "src"))
    assert only("acme-toy").status is Status.OK

    del sys.modules["acme_toy"]
    inside = project / "examples"
    (inside / "acme_toy").mkdir(parents=True)
    (inside / "acme_toy/__init__.py").touch()
    monkeypatch.syspath_prepend(str(inside))
    entry = only("acme-toy")
    assert entry.status is Status.SHADOWED, "another folder of the same project is not at home either"
    assert str(inside / "acme_toy") in entry.reason


def test_an_editable_install_by_an_import_hook_is_at_home_in_its_project(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = site.parent / "a project"
    (project / "src").mkdir(parents=True)
    (project / "src/acme_toy.py").write_text(plugin(manifest("toy", "acme_toy")))
    pth = {"__editable__.acme_toy.pth": "import __editable___acme_toy_finder\n"}
    install(site, "acme-toy", pth, points={"toy": "acme_toy"}, direct_url=editable(project))
    monkeypatch.syspath_prepend(str(project / "src"))
    assert only("acme-toy").status is Status.OK


def test_a_package_that_is_linked_into_site_packages_is_at_home(site: Path) -> None:
    store = site.parent / "store"
    store.mkdir()
    (store / "__init__.py").write_text(plugin(manifest("toy", "acme_toy")))
    (site / "acme_toy").symlink_to(store)
    install(site, "acme-toy", {}, points={"toy": "acme_toy"})
    assert only("acme-toy").status is Status.OK


def test_a_portion_of_a_namespace_package_is_at_home(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "acme-toy", {"acme/toy.py": plugin(manifest("toy", "acme"))}, points={"toy": "acme.toy"})
    other = site.parent / "other"
    (other / "acme").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(other))
    assert only("acme-toy").status is Status.OK


@pytest.mark.parametrize("package", ["core", "manymesh", "sdk"])
def test_a_package_of_another_place_than_the_installed_distribution_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    assert hidden_packages() == {}
    install(site, "manymesh", {f"{name}/__init__.py": "" for name in ("core", "manymesh", "sdk")}, version="9.0")
    (site / "manymesh-9.0.dist-info/entry_points.txt").unlink()

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        folder = (user if name == package else site) / name
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )

    monkeypatch.setattr("core._plugins.shadow.importlib.util.find_spec", find_spec)
    user = site.parent / "user"
    (user / package).mkdir(parents=True)
    ((name, error),) = hidden_packages().items()
    assert name == package
    assert "not part of the installed manymesh 9.0" in error.message
    assert error.have == str(user / package)
    assert error.want == str(site / package)
    entry = only("manymesh")
    assert (entry.name, entry.status, entry.version) == (package, Status.SHADOWED, "9.0")
    assert str(user / package) in entry.reason


def test_installed_packages_are_at_home_until_a_copy_of_one_comes_first(site: Path) -> None:
    here = Path(core.__file__).parent
    sources = {f"core/{file.relative_to(here)}": file.read_text() for file in here.rglob("*.py")}
    sources |= {"manymesh/__init__.py": "", "sdk/__init__.py": ""}
    install(site, "manymesh", sources, version="9.0", points={})
    script = (
        "import core; from core._plugins.shadow import check_packages; print(core.__file__); check_packages();"
        " print('at home')"
    )

    def run(*path: Path) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        return subprocess.run([sys.executable, "-c", script], env=env, cwd=site.parent, capture_output=True, text=True)

    fine = run(site)
    assert fine.stdout.splitlines() == [str(site / "core/__init__.py"), "at home"], fine.stderr
    for package, loaded in (("core", "user-core"), ("sdk", "site")):
        user = site.parent / f"user-{package}"
        shutil.copytree(site / package, user / package)
        hidden = run(user, site)
        assert hidden.stdout.splitlines() == [str(site.parent / loaded / "core/__init__.py")]
        assert f"{user / package} is imported, which is not part of the installed manymesh 9.0" in hidden.stderr


# --- asking --------------------------------------------------------------------------------------------------------


def test_two_distributions_of_one_name_are_both_listed_and_must_be_qualified(site: Path) -> None:
    install_toy(site, distribution="dist-a")
    install_toy(site, distribution="dist-b")
    registry = discovered()
    assert [entry.distribution for entry in registry.entries if entry.name == "toy"] == ["dist-a", "dist-b"]
    with pytest.raises(RegistryError, match="'toy' is ambiguous") as raised:
        registry.find("toy")
    assert raised.value.mend == "ask for dist-a:toy or dist-b:toy"
    assert registry.find("dist-a:toy").distribution == "dist-a"
    assert registry.find("Dist_B:toy").distribution == "dist-b"
    assert registry.find("Dist_B").distribution == "dist-b"


def names_of(entries: list[Entry]) -> list[str]:
    return [entry.qualified_name for entry in entries]


def test_one_rule_says_what_a_name_means(site: Path) -> None:
    """Also to the listing, `sdk check` and `sdk doctor`: they ask `named`."""
    several = [manifest("toy", "acme_toy"), manifest("toy", "acme_toy", kind="rollout"), manifest("top", "acme_toy")]
    install(site, "Acme.Toy", {"acme_toy.py": plugin(*several)})
    install_toy(site, name="acme-toy", distribution="other")
    install(site, "broken-toy", {"broken_toy.py": "1/0"}, points={"brk": "broken_toy"})
    registry = discovered()
    assert names_of(registry.named("toy")) == ["acme-toy:toy", "acme-toy:toy"]
    assert names_of(registry.named("toy", "rollout")) == ["acme-toy:toy"]
    assert names_of(registry.named("Acme_Toy:top")) == ["acme-toy:top"]
    assert names_of(registry.named("ACME.toy")) == ["acme-toy:top", "acme-toy:toy", "acme-toy:toy"], "a distribution"
    assert names_of(registry.named("acme-toy")) == ["other:acme-toy"], "a backend of that name goes first"
    assert registry.find("ACME.toy", "rollout").name == "toy"
    for name in ("brk", "Broken_Toy", "broken-toy:brk", "broken-toy:any"):
        assert names_of(registry.named(name)) == ["broken-toy:brk"], "any of its backends may have been meant"
    for name in ("acme-toy:gone", "gone:toy", "Toy", ":toy:"):
        with pytest.raises(RegistryError, match=f"no plugin '{name}' is installed"):
            registry.named(name)


def test_one_name_may_have_a_backend_for_each_device_and_model_type(site: Path) -> None:
    both = [manifest("toy", "acme_toy", devices={device}) for device in ("cpu", "cuda")]
    install(site, "acme-toy", {"acme_toy.py": plugin(*both)})
    registry = discovered()
    assert registry.find("toy", device="cuda").manifest.devices == {"cuda"}
    with pytest.raises(RegistryError, match="ambiguous") as raised:
        registry.find("toy")
    assert "device cpu" in raised.value.mend
    assert "device cuda" in raised.value.mend


def test_what_a_backend_does_not_offer_is_refused_with_what_it_offers(site: Path) -> None:
    install_toy(site, devices={"cuda"}, vendors={"nvidia"}, model_types={"value_model"})
    registry = discovered()
    assert registry.find("toy", "engine", "value_model", "cuda:1", "nvidia").name == "toy"
    request = {"device": "cpu", "vendor": "amd", "model_type": "language_model"}
    for key, value in request.items():
        with pytest.raises(RegistryError, match=f"'toy' is not for {key.replace('_', ' ')} '{value}'") as raised:
            registry.find("toy", **{key: value})  # type: ignore[arg-type]
        assert raised.value.want == "model type value_model, device cuda, vendor nvidia"


def test_an_unknown_name_is_refused_with_the_nearest_and_what_is_there(site: Path) -> None:
    install_toy(site, name="sprocket")
    install_toy(site, name="gadget", distribution="acme-gadget", kind="rollout")
    install(site, "broken-toy", {"broken_toy.py": "raise OSError('disk')"})
    registry = discovered()
    with pytest.raises(RegistryError, match="there is no engine 'sproket'") as raised:
        registry.find("sproket")
    assert raised.value.mend == "did you mean 'sprocket'?"
    assert "sprocket" in str(raised.value.have)
    assert "broken-toy 1.0 (broken: OSError: disk)" in str(raised.value.have), "it may be the one that was meant"
    with pytest.raises(RegistryError) as raised:
        registry.find("gadget")
    assert raised.value.mend == "it is a rollout: ask with kind='rollout'"
    with pytest.raises(RegistryError) as raised:
        registry.find("acme-toy:sproket")
    assert raised.value.mend == "did you mean 'acme-toy:sprocket'?"
    with pytest.raises(RegistryError, match="no kind 'engin'") as raised:
        registry.find("sprocket", kind="engin")
    assert raised.value.mend == "did you mean 'engine'?"
    with pytest.raises(RegistryError) as raised:
        EngineRegistry(()).find("toy")
    assert "install a plugin" in raised.value.mend


# --- building ------------------------------------------------------------------------------------------------------


def test_build_structures_the_options_and_imports_only_the_chosen_backend(site: Path) -> None:
    install_toy(site)
    install_toy(site, name="other", distribution="acme-other")
    engine = discovered().find("toy").build({"learning_rate": 1}, "cpu")
    assert (engine.config.model, engine.config.learning_rate, engine.device) == ("tiny", 1.0, "cpu")
    assert "acme_other_backend" not in sys.modules
    again = discovered().find("toy").build(attrs.evolve(engine.config, model="big"))
    assert (again.config.model, again.device) == ("big", None)


def test_a_backend_of_several_model_types_is_told_which_was_asked_for(site: Path) -> None:
    install_toy(site, model_types={"language_model", "value_model"}, factory="acme_toy_both:make")
    (site / "acme_toy_both.py").write_text("def make(config, device, model_type): return model_type")
    backend = discovered().find("toy")
    for model_type in ("value_model", "language_model", None):
        assert backend.build({}, model_type=model_type) == model_type


def test_a_wrong_option_is_refused_with_path_and_nearest_name(site: Path) -> None:
    install_toy(site)
    with pytest.raises(ConfigError, match="unknown key 'learning_rat'") as raised:
        discovered().find("toy").build({"learning_rat": 1})
    assert raised.value.mend == "did you mean 'learning_rate'?"
    assert "engine 'toy'" in raised.value.where


@pytest.mark.parametrize(
    ("source", "cause"),
    [("import nobody_has_this", ModuleNotFoundError), ("import sys; sys.exit(1)", SystemExit), ("", AttributeError)],
)
def test_a_factory_that_cannot_be_imported_is_refused_with_the_cause(
    site: Path, source: str, cause: type[BaseException]
) -> None:
    install_toy(site, factory="acme_toy_factory:make")
    (site / "acme_toy_factory.py").write_text(source)
    with pytest.raises(RegistryError, match=r"factory of engine 'toy' of acme-toy 1\.0 cannot be imported") as raised:
        discovered().find("toy").build({})
    assert isinstance(raised.value.__cause__, cause)
    assert raised.value.where == "acme_toy_factory:make"


def test_a_choice_is_checked_in_the_process_that_builds_it(site: Path) -> None:
    install_toy(site)
    registry = discovered()
    choice = pickle.loads(pickle.dumps(registry.find("toy").choice))
    assert choice == Choice("engine", "toy", "acme-toy", "1.0")
    registry.find("toy").check(choice)
    assert registry.find("toy", expect=choice).choice == choice

    with pytest.raises(RegistryError, match="not what the driver chose") as raised:
        registry.find("toy", expect=attrs.evolve(choice, version="1.1"))
    assert raised.value.have == "engine 'toy' of acme-toy 1.0"
    assert raised.value.want == "engine 'toy' of acme-toy 1.1"
    assert f"process {os.getpid()} on" in raised.value.where
    assert raised.value.mend == "pip install acme-toy==1.1 on every node"

    missing = Choice("engine", "gone", "acme-gone", "1.0")
    with pytest.raises(RegistryError) as raised:
        registry.find("gone", expect=missing)
    assert raised.value.have == "no distribution acme-gone"
    assert raised.value.mend == "pip install acme-gone==1.0 on every node"

    install_toy(site, name="other", distribution="acme-other")
    with pytest.raises(RegistryError, match="not what the driver chose") as raised:
        discovered().find("other", expect=choice)
    assert raised.value.mend == "ask for acme-toy:toy"


def test_a_choice_that_is_broken_in_this_process_is_refused_with_its_reason(site: Path) -> None:
    install_toy(site, requires=(("nobody-has-this",),))
    with pytest.raises(RegistryError, match="not what the driver chose") as raised:
        discovered().find("toy", expect=Choice("engine", "toy", "acme-toy", "1.0"))
    assert "nobody-has-this is not installed" in str(raised.value.have)
    assert raised.value.mend == "pip install nobody-has-this"


OTHERS = """
import attrs
from core import Episode

@attrs.frozen
class Config:
    scale: float = 1.0

@attrs.frozen
class LengthReward:
    config: Config

    def __call__(self, completions, rows):
        return [self.config.scale * len(text) for text in completions]

@attrs.frozen
class OneQuestion:
    config: Config

    async def run(self, client, row):
        return Episode(float(await client(row["question"]) == row["answer"]), {"turns": 1.0})

@attrs.define
class Memory:
    config: Config
    steps: list = attrs.field(factory=list)

    def start(self, directory, run, step):
        self.steps = [step]

    def log(self, step, metrics, samples=()):
        self.steps.append((step, metrics["loss"] * self.config.scale))

    def close(self):
        self.steps.append("closed")
"""


def install_others(site: Path, kind: str, cls: str) -> Any:
    plugin_manifest = manifest("mine", "acme_others", kind=kind, factory=f"acme_others_backend:{cls}")
    install(site, "acme-others", {"acme_others.py": plugin(plugin_manifest), "acme_others_backend.py": OTHERS})
    (entry,) = entries("acme-others")
    assert (entry.kind, entry.status, entry.mend) == (kind, Status.OK, "")
    assert "acme_others_backend" not in sys.modules
    return discovered().find("mine", kind).build({"scale": 2})


def test_a_reward_of_a_plugin_is_listed_and_built_from_its_options(site: Path) -> None:
    reward: core.Reward = install_others(site, "reward", "LengthReward")
    assert reward(["a", "abc"], [{}, {}]) == [2.0, 6.0]


def test_an_environment_of_a_plugin_is_listed_and_built_from_its_options(site: Path) -> None:
    environment: core.Environment = install_others(site, "environment", "OneQuestion")

    async def client(question: str) -> str:
        return question.upper()

    episode = asyncio.run(environment.run(client, {"question": "x", "answer": "X"}))
    assert episode == core.Episode(1.0, {"turns": 1.0})


def test_a_tracker_of_a_plugin_is_listed_and_built_from_its_options(site: Path) -> None:
    tracker: Any = install_others(site, "tracker", "Memory")
    tracked: core.Tracker = tracker
    tracked.start(site, {}, 4)
    tracked.log(5, {"loss": 0.5})
    tracked.close()
    assert tracker.steps == [4, (5, 1.0), "closed"]


def test_a_kind_that_core_does_not_know_can_be_found_and_built(site: Path) -> None:
    """With a config class or without, as somebody else's recipe needs it."""
    reward = install_others(site, "examiner", "LengthReward")
    assert reward.config.scale == 2.0
    bare = manifest("bare", "acme_bare", kind="examiner", config=None, factory="builtins:dict")
    install(site, "acme-bare", {"acme_bare.py": plugin(bare)})
    assert discovered().find("bare", "examiner").build({"any": "thing"}) == {"any": "thing"}
    with pytest.raises(RegistryError) as raised:
        discovered().find("bare", "examinr")
    assert raised.value.mend == "did you mean 'examiner'?"


PLANNER = """
from core.errors import Refused
from core.manifest import Plan
from core.mesh import MeshLayout

def plan(config, world_size, model):
    if world_size % 2:
        raise Refused("odd worlds are not for this toy", have=world_size, want="2, 4, ...")
    layout = MeshLayout(("dp", "tp"), (world_size // 2, 2))
    return Plan(layout, layout.route(("dp",), {"tp": 0}))

def nonsense(config, world_size, model):
    return 7
"""


def test_a_plan_comes_from_the_manifests_planner_without_building_anything(site: Path) -> None:
    sources = {"acme_toy_backend.py": BACKEND, "acme_toy_plan.py": PLANNER}
    offers = {"toy": {"planner": "acme_toy_plan:plan"}, "bad": {"planner": "acme_toy_plan:nonsense"}, "none": {}}
    source = plugin(*(manifest(name, "acme_toy", **more) for name, more in offers.items()))
    install(site, "acme-toy", {"acme_toy.py": source} | sources)
    registry = discovered()
    toy = registry.find("toy")
    plan = toy.plan({}, 4, None)
    assert plan is not None
    assert plan.route.dp_ranks == (0, 0, 1, 1)
    with pytest.raises(Refused, match="odd worlds"):
        toy.plan({}, 3, None)
    with pytest.raises(ConfigError):
        toy.plan({"modle": "x"}, 4, None)
    with pytest.raises(RegistryError, match="gives no Plan"):
        registry.find("bad").plan({}, 4, None)
    assert registry.find("none").plan({}, 4, None) is None


def test_the_class_asks_one_registry_that_is_discovered_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineRegistry.default() is EngineRegistry.default()
    install_toy(site)
    registry = discovered()
    monkeypatch.setattr("core.registry._default", lambda: registry)
    backend = EngineRegistry.get("toy")
    assert backend in registry.entries
    assert EngineRegistry.new("language_model", "toy", {}, device="cpu", expect=backend.choice).device == "cpu"
    with pytest.raises(RegistryError, match="no rollout 'toy'"):
        EngineRegistry.get("toy", kind="rollout")
