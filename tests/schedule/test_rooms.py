"""Which module may import which: rooms stand on floors, and the first three never import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
FLOORS = [
    "errors", "schedule", "timeline", "idle", "simulate", "plan", "weights", "runtime", "models", "train", "view",
    "cli", "__main__",
]  # fmt: skip
TORCH_FREE = ("errors", "schedule", "timeline", "idle", "simulate")


def modules():
    """Every module of the package but its own `__init__`, which exports from all rooms: (dotted name, path)."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield ".".join(("penstock", *parts)).removesuffix(".__init__"), path


def imports(name, path):
    """The dotted names that a module imports, wherever the import stands: at the top, in a function, for typing."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module == "penstock":  # from penstock import runtime
                yield from (f"penstock.{alias.name}" for alias in node.names)
            else:
                yield module


def room_of(name):
    return name.split(".")[1] if name.startswith("penstock.") else None


def floor_of(name):
    """0 for what is not ours; the package itself exports from everywhere, so it stands above all rooms."""
    if name.split(".")[0] != "penstock" or name == "penstock.__version__":
        return 0
    return FLOORS.index(room_of(name)) if room_of(name) in FLOORS else len(FLOORS)


def test_every_module_belongs_to_a_room():
    rooms = {room_of(name) for name, _ in modules()}
    assert rooms <= set(FLOORS), "a new room needs a floor in this list and in docs/design.md"
    assert set(TORCH_FREE) <= rooms


def test_a_room_imports_only_rooms_below():
    upwards = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imports(name, path)
        if floor_of(target) > floor_of(name)
    ]
    assert upwards == []


def test_the_first_rooms_name_torch_nowhere():
    named = [
        f"{name} imports {target}"
        for name, path in modules()
        if room_of(name) in TORCH_FREE
        for target in imports(name, path)
        if target.split(".")[0] in ("torch", "numpy")
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
    parts = [(name, path) for name, path in modules() if name.startswith("penstock.train.reference")]
    used = {target for name, path in parts for target in imports(name, path)}
    ours = {target for target in used if target.split(".")[0] == "penstock"}
    assert len(parts) > 5
    assert {target for target in ours if not target.startswith("penstock.train.reference")} == {"penstock.errors"}


def test_no_family_of_orders_is_long():
    """Fewer than a hundred statements a file, docstrings not counted."""
    found = {}
    for name, path in modules():
        if name.startswith("penstock.schedule.orders."):
            nodes = ast.walk(ast.parse(path.read_text()))
            statements = [node for node in nodes if isinstance(node, ast.stmt)]
            texts = [n for n in statements if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
            found[name] = len(statements) - len(texts)
    assert len(found) > 15
    assert {name: count for name, count in found.items() if count >= 100} == {}


def test_no_function_is_long():
    """Sixty lines, the signature and the docstring included."""
    found = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: lines for name, lines in found.items() if lines > 60} == {}
