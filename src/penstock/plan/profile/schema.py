"""The schema of profile files: the layers of a model, what each costs, and which reads which."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

MOST_LAYERS = 5_000
MOST_DEVICES = 1 << 20

Number = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Numbers: TypeAlias = Number | Annotated[list[Number], Field(min_length=1, max_length=64)]


def _name(value: object) -> object:
    """Return a whole number, as YAML reads `layer: 3`, as the name that it stands for."""
    return str(value) if type(value) is int and value.bit_length() < 64 else value


Name = Annotated[str, BeforeValidator(_name), Field(min_length=1, max_length=200)]


class _Strict(BaseModel):
    """No unknown keys, and no text that is read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LayerOption(_Strict):
    """One way to execute a layer, for planners that choose: on several devices, or with recompute.

    Attributes:
        name: such as "plain" or "recompute"; distinct among the options with one tensor degree.
        tensor: how many devices share the layer.
        seconds: forward and backward of a microbatch.
        parameters: bytes on each device that replicas add up once per batch.
        memory: bytes on each device that are always held.
        memory_per_microbatch: bytes on each device for every microbatch in flight.
        sync_in: bytes to gather from the shards of an input, by its name, if the input comes from another stage.
        sync_out: the same of an output that goes to another stage, by the reader's name.
    """

    name: Name = "plain"
    tensor: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    seconds: Numbers
    parameters: Number = 0.0
    memory: Number = 0.0
    memory_per_microbatch: Numbers = 0.0
    sync_in: dict[Name, Number] = Field(default_factory=dict, max_length=MOST_LAYERS)
    sync_out: dict[Name, Number] = Field(default_factory=dict, max_length=MOST_LAYERS)


class LayerInput(_Strict):
    """An input of a layer.

    Attributes:
        layer: the name of the layer that computes it.
        bytes: its size per microbatch; the whole output of that layer if not given.
    """

    layer: Name
    bytes: Numbers | None = None


class ProfiledLayer(_Strict):
    """A layer, or block, and what it costs; sizes and times are those of one microbatch.

    Attributes:
        name: unique in the profile.
        kind: what it is; layers of one kind may be alike.
        inputs: the layers that it reads; not given: the layer before it in the file. `[]` for none.
        forward, backward: seconds; the backward is the whole one.
        backward_input, backward_weight: seconds of the two halves of a backward, where it was measured in halves.
        output: bytes of its output.
        stored: bytes that are kept from forward to backward; `output` if not given.
        shared: bytes of `stored` that the layer before keeps as well, if both are in one stage.
        movable: bytes of `stored` that can be moved to the host's memory and back, in a stage of its own; not given
            where that is not known.
        movable_with: the same in addition, if the layer before is in the same stage, as its output can be moved then.
        late: bytes that are kept between the halves of a backward.
        data: bytes of the model's own input that it reads, as passes compute with them.
        gradient: bytes of the gradient that comes back for its output; those of the output if not given.
        trained: whether an optimizer steps its parameters; if not, all numbers are those of the trained layer, and what
            the frozen one takes follows from them (`penstock.plan.profile.layer_graph`).
        parameters: bytes.
        buffer: bytes of one copy of the parameters in memory, padding included; `parameters` if not given.
        whole: bytes of one full-size copy of them, as of gradients and master weights, where passes compute in 16 bits;
            not given where they do not.
        frozen: bytes of its frozen parameters and module buffers.
        optimizer: bytes that the optimizer remembers; those of Adam if not given.
        largest: bytes of its largest parameter, as of `whole`; all of them if not given.
        step: seconds of an update, besides `Profile.update`.
        options: ways to execute it, if it was profiled in several; then forward and backward may be left out.
    """

    name: Name
    kind: Annotated[str, Field(max_length=2_000)] = ""
    inputs: Annotated[list[Name | LayerInput], Field(max_length=MOST_LAYERS)] | None = None
    forward: Numbers | None = None
    backward: Numbers | None = None
    backward_input: Numbers | None = None
    backward_weight: Numbers | None = None
    output: Numbers = 0.0
    stored: Numbers | None = None
    shared: Numbers | None = None
    movable: Numbers | None = None
    movable_with: Numbers | None = None
    late: Numbers | None = None
    data: Numbers | None = None
    gradient: Numbers | None = None
    trained: bool = True
    parameters: Number = 0.0
    buffer: Number | None = None
    whole: Number | None = None
    frozen: Number = 0.0
    optimizer: Number | None = None
    largest: Number | None = None
    step: Number = 0.0
    options: Annotated[list[LayerOption], Field(max_length=64)] = Field(default_factory=list)

    def with_times(self, forward: float, backward: float, halves: tuple[float, float], step: float) -> ProfiledLayer:
        """Return the layer with its times multiplied by factors, but for those of its options."""
        factors = {"forward": forward, "backward": backward, "backward_input": halves[0], "backward_weight": halves[1]}
        times = {key: scaled(getattr(self, key), factor) for key, factor in factors.items()}
        return self.model_copy(update={**times, "step": self.step * step})


def scaled(numbers: Numbers | None, factor: float) -> Numbers | None:
    """Return numbers times a factor, at every microbatch size."""
    if isinstance(numbers, list):
        return [each * factor for each in numbers]
    return None if numbers is None else numbers * factor


BY_SIZE = frozenset(
    {
        "forward", "backward", "backward_input", "backward_weight", "output", "stored", "shared", "movable",
        "movable_with", "late", "data", "gradient",
    }
)  # fmt: skip
"""The keys of a layer that may have a number for each microbatch size."""

UNRESOLVED = 1e15
"""Bytes per second, more than any link has: where what bytes take was lost in the noise of the measurement."""


BY_FORMULAS = "analytic"
"""How the source of a profile begins that penstock made by formulas."""


class ProfiledLink(_Strict):
    """A link between two devices, on which a message takes latency + bytes / bandwidth.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.
        work, work_per_byte: seconds of a core that a message takes at each of its ends: work + bytes x work_per_byte.
    """

    latency: Number = 0.0
    bandwidth: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
    work: Number = 0.0
    work_per_byte: Number = 0.0


class Calibration(_Strict):
    """What work takes in runs on one machine, beside what was measured of each layer alone.

    Attributes:
        forward, backward, step: factors on the times of layers; that of `step` also on `Profile.update`.
        between: seconds of a rank from one pass to the next one, besides waits for other ranks.
        runs: that it was fitted to.
    """

    forward: Factor = 1.0
    backward: Factor = 1.0
    step: Factor = 1.0
    between: Number = 0.0
    runs: Annotated[list[Name], Field(max_length=64)] = Field(default_factory=list)


class Profile(_Strict):
    """A profile file.

    Attributes:
        format: says what the file is.
        name: of the model.
        source: where the numbers come from.
        microbatch_sizes: the sizes at which lists of numbers were measured, ascending; None if there is one, unnamed.
        microbatches: microbatches per batch, if the profile has an opinion.
        settings: keys of `penstock train` that train the model as it was profiled, for a plan of it; none for a model
            that it does not have.
        links: between devices, those of a level each, the innermost first; or one for all levels.
        cores: how many ranks can work at full speed at once, of all those on the machine where the layers and links
            were measured; None if every device computes by itself.
        calibration: by how much more work takes in runs; None if that is not known.
        update: seconds of the update of a stage, besides those of its layers; every stage is taken to have one.
        layers: in any order in which a layer without `inputs` follows the one that it reads.
    """

    format: Literal["penstock profile 1"]
    name: Name = "model"
    source: Annotated[str, Field(max_length=2_000)] = ""
    microbatch_sizes: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], Field(min_length=1)] | None = None
    microbatches: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    settings: Annotated[dict[Name, JsonValue], Field(max_length=64)] = Field(default_factory=dict)
    links: Annotated[list[ProfiledLink], Field(max_length=8)] = Field(default_factory=list)
    cores: Annotated[float, Field(gt=0, le=MOST_DEVICES, allow_inf_nan=False)] | None = None
    calibration: Calibration | None = None
    update: Number = 0.0
    layers: Annotated[list[ProfiledLayer], Field(min_length=1, max_length=MOST_LAYERS)]

    @property
    def tensor_parallel(self) -> int:
        """How many processes have measured their parts of every block together, as they would share it in a run."""
        found = self.settings.get("tensor_parallel", 1)
        return found if isinstance(found, int) else 1

    @property
    def freezes(self) -> bool:
        """Whether it says of some layer, with `trained: false`, that its parameters are not trained."""
        return not all(layer.trained for layer in self.layers)

    @property
    def can_be_simulated(self) -> bool:
        """Whether it says what schedules are simulated from, so that nothing has to be guessed.

        Of each layer: seconds of its passes, bytes that are kept from forward to backward, and those that its optimizer
        remembers. Layers stand in an order in which they run. Whoever has written it, and whatever `source` says.
        """
        before = set[str]()
        for layer in self.layers:
            if None in (layer.forward, layer.backward, layer.stored, layer.optimizer):
                return False
            if any((each if isinstance(each, str) else each.layer) not in before for each in layer.inputs or ()):
                return False
            before.add(layer.name)
        return True

    @property
    def in_runs(self) -> Calibration:
        """The calibration; one that changes nothing where there is none."""
        return self.calibration or Calibration()

    @property
    def update_in_runs(self) -> float:
        """Seconds of the update of a stage in runs, besides those of its layers."""
        return self.update * self.in_runs.step
