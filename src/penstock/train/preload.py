"""What every worker imports: once, in the process that they are forked from, instead of in each of them.

Nothing of it may start threads or touch an accelerator.
"""

import torch._dynamo  # noqa: F401  what the first optimizer of a process would import

import penstock.train.loop  # noqa: F401
