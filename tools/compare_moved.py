"""Show that moved modules are unchanged but for imports and names.

    python tools/compare_moved.py REV [--names OLD=NEW ...] [-- PATH ...]

Pairs every Python file below src with the file at REV that git regards as its source, parses both, drops imports,
docstrings and comments, applies the given renames to identifiers, and compares the rest. Prints the pairs that differ
and a count of those that do not; exit code 1 if any differ. Definitions that moved from one module to another are
listed as such when the same definition stands elsewhere in the new tree.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

_IMPORTS = (ast.Import, ast.ImportFrom)


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def definitions(source: str, names: dict[str, str]) -> list[str]:
    """The top-level statements of a module, each dumped without imports, docstrings and positions."""

    class Normalize(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST | None:
            super().generic_visit(node)
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
            for field in ("id", "attr", "arg", "name"):
                value = getattr(node, field, None)
                if isinstance(value, str) and value in names:
                    setattr(node, field, names[value])
            return node

        def visit_Import(self, node: ast.Import) -> None: ...

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    tree = Normalize().visit(ast.parse(source))
    return [
        ast.dump(node)
        for node in tree.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) and not isinstance(node, _IMPORTS)
    ]


def pairs(revision: str) -> list[tuple[str, str]]:
    """(old path, new path) of every Python file of src that exists on both sides."""
    found = []
    for line in git("diff", "--name-status", "-M30%", revision, "--", "src").splitlines():
        status, *paths = line.split("\t")
        if paths[-1].endswith(".py") and status[0] in "RM":
            found.append((paths[0], paths[-1]))
    return found


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--names", nargs="*", default=[], metavar="OLD=NEW")
    given = parser.parse_args()
    names = dict(name.split("=", 1) for name in given.names)
    everywhere = {d: str(p) for p in Path("src").rglob("*.py") for d in definitions(p.read_text(), {})}
    same, different = 0, []
    for old, new in pairs(given.revision):
        before = definitions(git("show", f"{given.revision}:{old}"), names)
        after = set(definitions(Path(new).read_text(), {}))
        missing = [d for d in before if d not in after]
        lost = [d for d in missing if d not in everywhere]
        same += not lost
        for d in missing:
            if d in everywhere:
                print(f"moved: {d[:60]}... from {old} to {everywhere[d]}")
        different += [(old, new, d) for d in lost]
    for old, new, d in different:
        print(f"differs: {old} -> {new}: {d[:100]}")
    print(f"{same} modules unchanged but for imports and names; {len({o for o, *_ in different})} differ")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
