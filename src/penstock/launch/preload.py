"""What every worker imports: once, in the process that they are forked from, instead of in each of them.

Only that process imports this module. It and the workers are a process group of their own, so that what is sent to the
launcher's group (Ctrl-C in a terminal, `timeout`, `kill -- -GROUP`) reaches the launcher alone, which then asks the
workers; where every process gets the signal, this one goes on until the launcher has ended. Nothing here may start
threads or touch an accelerator.
"""

# ruff: noqa: E402  (signals first: what follows takes seconds)
import os
import signal

from penstock.launch.parent_death import end_with_parent

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
os.setpgid(0, 0)
end_with_parent()

import torch._dynamo  # noqa: F401  what the first optimizer of a process would import

import penstock.train.loop  # noqa: F401
