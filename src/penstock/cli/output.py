"""Print results: for people, and for programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text


def print_words(console: Console, text: Text) -> None:
    """Print a text, which a terminal shows with no word divided; who reads the output gets it on one line."""
    console.print(text, soft_wrap=not console.is_terminal)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
