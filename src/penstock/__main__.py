"""Entry point of `python -m penstock`, which torchrun can start."""

import os
import sys

if sys.path and sys.path[0] == os.getcwd():
    del sys.path[0]  # Python adds the working folder; files in it must not take the place of modules

from penstock.cli import main

main()
