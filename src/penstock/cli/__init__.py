"""The command line: `penstock show`, `simulate`, `train`, `verify`, `compare` and so on."""

from penstock.cli.app import app, main

__all__ = ["app", "main"]
