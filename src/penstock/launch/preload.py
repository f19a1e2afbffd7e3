"""Imports of all workers, done once in the fork server that they are forked from.

Only the fork server imports this module. It and the workers are a process group of their own, so that signals sent to
the launcher's group (Ctrl-C in a terminal, `timeout`, `kill -- -GROUP`) reach only the launcher, which then asks the
workers to stop; where every process gets the signal, the server holds it back and lives until the launcher has ended.
Nothing here may start threads or touch an accelerator.
"""

# ruff: noqa: E402  (signals first: the imports take seconds)
import gc
import os
import signal

from penstock.launch.signals import ENDING, end_with_parent

signal.signal(signal.SIGINT, signal.SIG_IGN)
# Blocked and not ignored: a worker that is signalled before it has begun ends when it does (`take_default`).
signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
os.setpgid(0, 0)
end_with_parent()

import torch._dynamo  # noqa: F401  (the first optimizer of a process would import it)

import penstock.launch.worker_exit
import penstock.train.loop  # noqa: F401

gc.freeze()  # a collection in a worker would touch, and so copy, every page of what it has been forked with
