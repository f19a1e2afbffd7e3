"""Print results for programs."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
