"""The command line: `penstock show`, `simulate`, `train`, `verify`, `compare` and so on."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it without a word, too."""
    try:
        from penstock.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
