"""Which module may import which: folders stand on floors, and the lowest ones never import torch.

The floors are the list in docs/design.md, from the ground up; a folder may import those above it in the list only.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
TORCH_FREE = ("errors", "checks", "schedule", "timeline", "idle_time", "simulate", "plan")


def floors():
    """The folders (and modules at the top) in the order of docs/design.md, the ground first."""
    block = re.search(r"```text\n(errors\.py.*?)```", DESIGN.read_text(), re.DOTALL)
    assert block, "docs/design.md lists the floors in a block that begins with errors.py"
    return [line.split()[0].removesuffix(".py").rstrip("/") for line in block[1].splitlines() if line.strip()]


FLOORS = floors()


def modules():
    """Every module of the package but its own `__init__`, which exports from all rooms: (dotted name, path)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield ".".join(("penstock", *parts)).removesuffix(".__init__"), path


@cache
def imports(name, path):
    """The dotted names that a module imports, wherever the import stands: at the top, in a function, for typing."""
    return tuple(_imports(name, path))


def _imports(name, path):
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for stage in ast.walk(ast.parse(path.read_text())):
        if isinstance(stage, ast.Import):
            yield from (alias.name for alias in stage.names)
        elif isinstance(stage, ast.ImportFrom):
            base = package[: len(package) - stage.level + 1] if stage.level else []
            module = ".".join([*base, *filter(None, [stage.module])])
            if module == "penstock":  # from penstock import runtime
                yield from (f"penstock.{alias.name}" for alias in stage.names)
            else:
                yield module


@cache
def definitions():
    """The modules that define each name at their top: of classes, and of functions."""
    classes, functions = {}, {}
    for name, path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found = classes if isinstance(node, ast.ClassDef) else functions
                found.setdefault(node.name, []).append(name)
    return classes, functions


def room_of(name):
    return name.split(".")[1] if name.startswith("penstock.") else None


def folder_of(name):
    """The folder that holds a module (its path below src/penstock), or the name of a module at the top."""
    parts = name.split(".")[1:]
    while parts and not (ROOT.joinpath(*parts).is_dir() or (len(parts) == 1 and (ROOT / f"{parts[0]}.py").is_file())):
        parts = parts[:-1]
    return "/".join(parts)


def floor_of(name):
    """-1 for what is not ours; the package itself exports from everywhere, so it stands above all floors."""
    if name.split(".")[0] != "penstock" or name == "penstock.__version__":
        return -1
    return FLOORS.index(folder_of(name)) if folder_of(name) in FLOORS else len(FLOORS)


def test_every_folder_has_a_floor_in_the_design():
    found = {folder_of(name) for name, path in modules() if path.name != "__init__.py"}
    assert found == set(FLOORS)
    assert len(FLOORS) == len(set(FLOORS))


def test_a_folder_imports_only_folders_below():
    """As the list is in one order, no two folders import each other, however many lie between them."""
    upwards = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imports(name, path)
        if floor_of(target) > floor_of(name)
    ]
    assert upwards == []


def test_no_class_name_stands_twice():
    """A name on a stack trace or in a search means one thing."""
    found, _ = definitions()
    assert found
    assert {cls: where for cls, where in found.items() if len(where) > 1} == {}


def test_no_public_function_name_stands_twice():
    """But for functions of users, which have the name of what stands behind them."""
    for_users = ("penstock.cli", "penstock.proven_schedule")
    found = {name: where for name, where in definitions()[1].items() if not name.startswith("_")}
    behind = {name: [each for each in where if not each.startswith(for_users)] for name, where in found.items()}
    assert found
    assert {name: where for name, where in behind.items() if len(where) > 1} == {}


def test_the_first_rooms_name_torch_nowhere():
    """Nor numpy, but for arrays: large schedules, the compiled simulator, what ranks hold at once, the planners."""
    of_arrays = "one_f_one_b", "interleaved", "breadth_first", "zb_v"
    arrays = (
        *(f"penstock.schedule.orders.{name}" for name in of_arrays),
        "penstock.schedule.ir.arrays",
        "penstock.schedule.transforms.array_rule",
        "penstock.schedule.array_schedules",
        "penstock.schedule.compiled",
        "penstock.simulate.compiled_span",
        "penstock.simulate.memory.held",
        "penstock.simulate.array_time_split",
        "penstock.simulate.message_counts",
        "penstock.plan",
    )
    named = [
        f"{name} imports {target}"
        for name, path in modules()
        if room_of(name) in TORCH_FREE
        for target in imports(name, path)
        if target.split(".")[0] == "torch" or (target.split(".")[0] == "numpy" and not name.startswith(arrays))
    ]
    assert named == []


def test_importing_the_first_rooms_loads_no_torch():
    names = [name for name, _ in modules() if room_of(name) in TORCH_FREE]
    assert len(names) > 10
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_import_finder_sees_every_form(tmp_path):
    """A finder that overlooks imports would make the tests above pass for nothing."""
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.nn\nfrom penstock import runtime\nfrom penstock.view import draw\n"
        "from . import check\nfrom ..simulate import costs\n"
        "def late():\n    from penstock.cli import main\n"
    )
    found = set(imports("penstock.schedule.module", path))
    assert found == {
        "torch.nn", "penstock.runtime", "penstock.view", "penstock.schedule", "penstock.simulate", "penstock.cli",
    }  # fmt: skip


def test_the_reference_shares_nothing_with_what_it_judges():
    """Equations, data and names of its own: no schedule, no weights, no runtime."""
    parts = [(name, path) for name, path in modules() if name.startswith("penstock.verify.reference")]
    used = {target for name, path in parts for target in imports(name, path)}
    ours = {target for target in used if target.split(".")[0] == "penstock"}
    assert len(parts) > 5
    assert {target for target in ours if not target.startswith("penstock.verify.reference")} == {"penstock.errors"}
