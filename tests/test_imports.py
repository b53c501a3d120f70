"""The order of the house: imports go down, names load when they are used, old paths still work."""

import ast
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import zeromean as zm
from zeromean.moved import MOVED

SOURCE = Path(zm.__file__).parent
# From the bottom to the top; a package may import from those before it.
ORDER = (
    "moved",
    "arguments",
    "extras",
    "registry",
    "text_table",
    "functional",
    "distributions",
    "samplers",
    "layers",
    "models",
    "moments",
    "prediction",
    "conversion",
    "files",
    "data",
    "compression",
    "export",
    "uncertainty",
    "training",
    "ensembles",
    "robustness",
    "estimators",
    "commands",
    "experiments",
    "cli",
)
HEAVY = ("torch", "numpy", "lightning", "sklearn", "matplotlib", "plotly")
# They use the library as its users do.
MAY_IMPORT_EVERYTHING = ("commands", "experiments", "cli")


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if parts and parts != ("__main__",):
            yield ".".join(parts), path


def imported(path):
    """Modules of the package that a file imports anywhere: at its top, in functions, for types."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "zeromean")


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_go_down(name, path):
    own = name.split(".")[0]
    for target in imported(path):
        _, *parts = target.split(".")
        if not parts or parts[0] not in ORDER:
            assert own in MAY_IMPORT_EVERYTHING, f"{name} imports all of zeromean: {target}"
        else:
            assert ORDER.index(parts[0]) <= ORDER.index(own), f"{name} imports upwards: {target}"


def test_every_entry_has_its_place_and_none_is_named_like_a_function():
    entries = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert entries - {"__init__", "__main__", "__pycache__"} == set(ORDER)
    assert not entries & set(zm.__all__)


def packages():
    return [path.parent for path in sorted(SOURCE.rglob("__init__.py")) if path.parent != SOURCE]


@pytest.mark.parametrize("package", packages(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_package_hides_a_module_behind_what_it_exports(package):
    """`import zeromean.a.b as b` must bind the module, whatever `zeromean.a` takes from it."""
    own = {p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    name = ".".join(("zeromean", *package.relative_to(SOURCE).parts))
    tree = ast.parse((package / "__init__.py").read_text("utf-8"))
    taken = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != name
        for alias in node.names
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert not own & (taken | defined)


def test_tests_mirror_the_tree():
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    known = {path.relative_to(SOURCE) for path in packages()}
    assert folders <= known, "a folder of tests has the name of the package that it tests"
    assert {path for path in known if len(path.parts) == 1} <= folders, "a package has no tests"


def test_names_are_those_that_type_checkers_see():
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert {name: f"zeromean.{module}" for name, module in zm._MODULE_OF.items()} == seen
    assert set(zm.__all__) == set(seen)
    assert set(zm.__all__) <= set(dir(zm))
    with pytest.raises(AttributeError, match="no attribute 'linear'"):
        _ = zm.linear


@pytest.mark.parametrize(
    "code",
    [
        "import zeromean",
        "from zeromean.cli import main; main(['--help'])",
        "from zeromean.cli import main; main(['list', '--runs', 'nowhere'])",
        "from zeromean.cli import main; main(['run', 'no_such_thing'])",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(processes, code):
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    printed = processes.run([sys.executable, "-c", script]).stdout
    assert printed.splitlines()[-1] == "[]"


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_work_and_say_where_the_module_has_gone(monkeypatch, old):
    name = f"zeromean.{old}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{name} has moved to zeromean\.{MOVED[old][0]}"):
        module = import_module(name)
    for home in MOVED[old]:
        for public in getattr(import_module(f"zeromean.{home}"), "__all__", ()):
            assert getattr(module, public) is getattr(import_module(f"zeromean.{home}"), public)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


def test_packages_and_old_modules_are_attributes_too(monkeypatch):
    found = {path.name for path in packages() if path.parent == SOURCE}
    assert set(zm._PACKAGES) == found - {"commands", "experiments"} | {"export"}
    assert zm.samplers.local is zm.local
    assert zm.training.fit.__name__ == "fit"
    monkeypatch.delitem(sys.modules, "zeromean.posteriors", raising=False)
    with pytest.warns(DeprecationWarning, match="has moved"):
        assert zm.posteriors.Additive is zm.Additive


def test_an_old_path_does_not_hide_a_function_of_its_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        sampling = import_module("zeromean.sampling")
        assert sampling.sampling is zm.sampling
    assert callable(zm.sampling)
    assert callable(zm.sparsity)
