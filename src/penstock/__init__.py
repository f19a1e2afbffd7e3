"""Penstock: pipeline-parallel training that wastes neither time nor memory.

    pipeline = penstock.Pipeline(
        blocks, method="2bw", stages=2, microbatches=4, loss=loss, optimizer=lambda named: torch.optim.AdamW(named)
    )
    for report in pipeline.run(loader):
        print(report.batch, report.loss)
    penstock.write_trace(pipeline.timeline(), "trace.json")

`__init__.pyi` lists the public API. Names are loaded when they are first used, so that schedules can be built, proven
and simulated without torch.
"""

import os
import sys
from contextlib import suppress

# `python -m penstock` begins the path with the working folder; files in it must not take the place of modules.
if sys.argv[:1] == ["-m"] and any(a.endswith("penstock") for a in sys.orig_argv):
    with suppress(FileNotFoundError):  # it is gone, and so not there
        if sys.path[:1] == [os.getcwd()]:
            del sys.path[0]

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
