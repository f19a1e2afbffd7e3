"""What to write in place of a whole model: the lines that take it apart into blocks."""

from __future__ import annotations

from torch import nn

from penstock.partition.followed_forward import CannotFollowError
from penstock.partition.traced_blocks import BlockLines, blocks_of_forward, called_parts
from penstock.partition.transformers_models import is_of_transformers, known_lines

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CALL = nn.Module.__call__
_PLAIN = "pass the parts of the model itself"
WRAPPERS = {
    "DistributedDataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "DataParallel": f"{_PLAIN} (model.module), and data_parallel=2 for two parallel pipelines",
    "FullyShardedDataParallel": f"{_PLAIN}: its stages are sharded over the ranks already",
}
"""What wraps modules for other kinds of parallelism, with what to do instead."""

_WIDTH = 100  # of a line of code that is shown

_OWN = """\
class Part(torch.nn.Module):  # around what takes or returns more than one value
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)  # as the forward of the model calls it, with masks, positions and the like made here

blocks = {'first': Part(model.first), 'second': model.second}  # in the order of the forward
assert torch.equal(torch.nn.Sequential(*blocks.values())(inputs), model(inputs))  # in eval() mode, if it has dropout"""


def own_part(container: nn.Module) -> str | None:
    """Return what a container has that would be lost if its children were called in turn; None if nothing.

    Args:
        container: an nn.Sequential, nn.ModuleList or nn.ModuleDict, or of a class made from one.
    """
    base = nn.Sequential if isinstance(container, nn.Sequential) else nn.Module
    if getattr(container.forward, "__func__", None) is not base.forward or type(container).__call__ is not _CALL:
        return "a forward of its own"
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if any(getattr(container, kind) for kind in hooks):
        return "hooks"
    state = next(iter({**container._parameters, **container._buffers}), None)
    return None if state is None else f"a parameter or buffer of its own, {state}"


def in_place_of(model: nn.Module) -> str:
    """Return what to write in place of a model, which cannot be cut as it is."""
    kind = type(model).__name__
    if kind in WRAPPERS:
        return f"the model is of type {kind}; {WRAPPERS[kind]}"
    if kind == "OptimizedModule":  # of torch.compile
        return f"the model is compiled as a whole; {_PLAIN}, and compile each: for block in blocks: block.compile()"
    what = f"{kind} has {own_part(model)}, so it is one" if isinstance(model, CONTAINERS) else f"{kind} is one"
    try:
        made = _made(model)
    except CannotFollowError as error:
        return (
            f"{what} module, which cannot be cut, and its forward cannot be followed to find its parts: {error}. "
            "Pass the parts that it calls one after the other, each with one value in and one out (a tensor, or a "
            "tuple or dict of tensors):\n" + _indented(f"{_OWN}\n{_PIPELINE}\n{_BACK}")
        )
    lines, notes = made
    return (
        f"{what} module, which cannot be cut; pass the parts that its forward calls one after the other, each "
        f"with one value in and one out. These are they, for inputs without further arguments:\n{_indented(lines)}"
        + "".join(f"\n{note}" for note in notes)
    )


_PIPELINE = "pipeline = penstock.Pipeline(blocks, ...)"
_BACK = "weights = pipeline.full_state_dict(model)  # on all ranks; then, on rank 0: model.load_state_dict(weights)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _made(model: nn.Module) -> tuple[str, list[str]]:
    """Return the lines that make the blocks of a model, and take their weights back; and what to know of them.

    Raises:
        CannotFollowError: there are none that are known to be right.
    """
    if is_of_transformers(model):
        lines = known_lines(model)
        if lines is None:
            raise CannotFollowError("models of transformers take masks, caches and more")
        return f"{lines}\n{_PIPELINE}\n{_BACK}", []
    if type(model).forward is nn.Module.forward:
        raise CannotFollowError("it has none")
    code = BlockLines()
    code.items = called_parts("", model)  # a TransformerEncoder
    if not code.items:
        code = blocks_of_forward(model)
    one_line = f"blocks = {{{', '.join(code.items)}}}"
    dictionary = "\n".join(["blocks = {", *[f"    {item}," for item in code.items], "}"])
    blocks = one_line if len(one_line) <= _WIDTH else dictionary
    return "\n".join([*code.classes, blocks, _PIPELINE, _BACK]), code.notes
