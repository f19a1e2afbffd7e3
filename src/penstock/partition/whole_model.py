"""What to write in place of a whole model: the lines that take it apart into blocks."""

from __future__ import annotations

from torch import nn

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

_EMBEDDINGS = """\
class Embeddings(torch.nn.Module):  # of tokens and of their positions
    def __init__(self, parent):
        super().__init__()
        self.{tokens}, self.{places} = parent.{tokens}, parent.{places}

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.{tokens}(tokens) + self.{places}(positions)
"""


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
    if isinstance(model, CONTAINERS):
        return (
            f"{kind} has {own_part(model)}, so it is one module, which cannot be cut; pass the parts that its forward "
            "calls one after the other, each with one value in and one out. If these are its children, and nothing "
            "else:\n    blocks = dict(model.named_children())\n    pipeline = penstock.Pipeline(blocks, ...)"
        )
    lines = [*_before(model), *_lines(model), "pipeline = penstock.Pipeline(blocks, ...)", *_after(model)]
    return (
        f"{kind} is one module, which cannot be cut; pass the parts that its forward calls one after the other, each "
        "with one value in and one out (or an nn.Sequential of them; what takes more, such as a mask, needs a module "
        "around it that makes the rest). If these are all its parts, in this order:\n    "
        + "\n    ".join(line for text in lines for line in text.splitlines())
    )


def _before(model: nn.Module) -> list[str]:
    """Say what a model of `transformers` needs so that its layers hide later tokens where nobody passes a mask."""
    how = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return ['model.set_attn_implementation("sdpa")  # hides later tokens without a mask'] if how == "eager" else []


def _after(model: nn.Module) -> list[str]:
    """Say how trained weights come back, where names of blocks are not those of the model, or are nested."""
    if not any(_is_chain(child) or _two_embeddings(child) for child in (model, *model.children())):
        return []
    return [
        "weights = pipeline.full_state_dict(model)  # on all ranks; then, on rank 0: model.load_state_dict(weights)"
    ]


def _lines(model: nn.Module) -> list[str]:
    """Write the blocks of a model as a dict."""
    items, classes = _items(model, "")
    one_line = f"blocks = {{{', '.join(items) or '...'}}}"
    if len(one_line) <= _WIDTH:
        return [*classes, one_line]
    return [*classes, "blocks = {", *[f"    {item}," for item in items], "}"]


def _items(module: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the items of a dict, and the classes that they need."""
    items: list[str] = []
    classes: list[str] = []
    children = dict(module.named_children())
    two = _two_embeddings(module)
    if two:
        parent = f"model.{path}".removesuffix(".")
        items.append(f"{path.removesuffix('.') or 'embeddings'!r}: Embeddings({parent})")
        classes.append(_EMBEDDINGS.format(tokens=two[0], places=two[1]))
    for name, child in children.items():
        if name in two:
            continue
        if _is_chain(child):
            inner, needed = _items(child, f"{path}{name}.")
            items, classes = items + inner, classes + needed
        else:
            items.append(_spread(f"{path}{name}", child))
    return items, classes


def _two_embeddings(module: nn.Module) -> list[str]:
    """Return the names of two embeddings that a model begins with, whose outputs it adds up; none otherwise."""
    if isinstance(module, CONTAINERS):
        return []
    children = list(module.named_children())
    leading = [name for name, child in children[:3] if isinstance(child, nn.Embedding)]
    first = [name for name, _ in children[:2]]
    return leading if leading == first and len(children) > len(first) else []


def _is_chain(module: nn.Module) -> bool:
    """Whether a child is a model of its own, with layers inside."""
    return not isinstance(module, CONTAINERS) and any(isinstance(child, nn.ModuleList) for child in module.children())


def _spread(name: str, child: nn.Module) -> str:
    """Write a child as blocks: the parts of a container, or itself."""
    if not isinstance(child, nn.Sequential | nn.ModuleList) or own_part(child) is not None:
        return f"{name!r}: model.{name}"
    if list(child._modules) == [str(i) for i in range(len(child))]:
        return f"**{{f'{name}.{{i}}': block for i, block in enumerate(model.{name})}}"
    return f"**{{f'{name}.{{part}}': block for part, block in model.{name}.named_children()}}"
