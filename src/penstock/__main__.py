"""Entry point of `python -m penstock`, which torchrun can start."""

from penstock.cli import main

main()
