"""What every worker imports: once, in the process that they are forked from, instead of in each of them.

Nothing of it may start threads or touch an accelerator.
"""

__all__: list[str] = []
