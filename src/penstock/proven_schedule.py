"""A schedule with its proof, as users hold it, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rich.text import Text

from penstock.checks import in_brief
from penstock.errors import ConfigError
from penstock.guarded_files import write_whole
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED
from penstock.schedule.ir.order import NO_OPTIONS, Options, OrderFunction
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.ir.sharding import Sharding
from penstock.schedule.load import prove_file
from penstock.schedule.methods.choice import MethodChoice, ProofOfChoice, method as own_choice
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.method_parsing import written_method
from penstock.schedule.proof import check as proofs
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.torch_csv import to_torch_csv
from penstock.simulate.costs import Costs
from penstock.simulate.method_figures import delay_on
from penstock.simulate.simulate import Simulation, Window, simulate_schedule
from penstock.view.text import draw_timeline


@dataclass(frozen=True, repr=False)
class ProvenSchedule(ProofOfChoice):
    """A schedule that has been proven: complete, free of deadlock, and every pass reads the weights that it should.

    `make_schedule`, `check` and `load_schedule` return one, and ``Pipeline(schedule=...)`` takes it. The proof has
    derived what it needs, per rank: `versions` (weight copies), `delays` and `activations` (microbatches in flight);
    `stages` has more, per stage. `print` shows the text form.
    """

    @classmethod
    def of(cls, proof: Proof, chosen: MethodChoice | None = None) -> ProvenSchedule:
        """Return a proof in this form."""
        return cls(**{field.name: getattr(proof, field.name) for field in fields(Proof)}, chosen=chosen)

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.schedule.name

    @property
    def versions(self) -> tuple[int, ...]:
        """The most weight versions that a stage of each rank has alive at once."""
        return tuple(self.versions_on(rank) for rank in range(self.schedule.ranks))

    @property
    def delays(self) -> tuple[float, ...]:
        """By how many updates the weights that forwards of each rank read are late, in the mean over a batch."""
        return tuple(delay_on(self, rank) for rank in range(self.schedule.ranks))

    def simulate(self, costs: Costs | None = None, batches: int = 1, window: Window | None = None) -> Simulation:
        """Predict a span of batches.

        Args:
            costs: times of every stage; for each rank a forward of 1 and a backward of 2 if None.
            batches: length of the span; the pipeline starts empty and is drained.
            window: messages that may be outstanding on a lane; the least that costs no time if None.

        Raises:
            ConfigError: `batches` or `window` is below 1, or the costs are for another number of stages.
            ScheduleError: some ranks would wait for ever with this window.
        """
        return simulate_schedule(self, Costs.uniform(self.schedule) if costs is None else costs, batches, window=window)

    def draw(self, width: int = 120, *, costs: Costs | None = None, batches: int = 1) -> Text:
        """Return a drawing of a span, as `simulate` predicts it: a row per rank, the version read as a superscript.

        Args:
            width: columns to wrap at.
            costs, batches: as of `simulate`.

        Returns:
            A text of rich: `print` shows it plainly, `rich.print` in colours.
        """
        return draw_timeline(self.simulate(costs, batches).timeline, width)

    def save(self, path: Path | str) -> None:
        """Write the schedule to a file: for torch.distributed.pipelining if it ends in .csv, else in the text form.

        Raises:
            ConfigError: it cannot be written.
            ScheduleError: it has what torch's form cannot say.
        """
        target = Path(path)
        text = to_torch_csv(self.schedule) if target.suffix == ".csv" else f"{self.schedule}\n"
        try:
            write_whole(target, text)
        except OSError as error:
            raise ConfigError(f"cannot write the schedule to {str(target)!r}: {error.strerror or error}") from None

    def __str__(self) -> str:
        """The text form of the schedule."""
        return str(self.schedule)


def make_schedule(
    method_or_order: str | Method | MethodChoice | OrderFunction,
    stages: int,
    microbatches: int,
    *,
    rule: str | None = None,
    order: str | OrderFunction | None = None,
    options: Options = NO_OPTIONS,
    decides: bool = False,
    window: int | None = None,
    sharding: str | Sharding | None = None,
) -> ProvenSchedule:
    """Build a schedule and prove it.

    Args:
        method_or_order: a method by its name, or your own; or what `method` returned; or an order of your own: a
            function (stages, microbatches) -> for each rank its passes in one batch, as text: ``["F0 F1 B0 B1", "F0 B0
            F1 B1"]`` (or an `Order`).
        stages: d, the number of stages; of a method that places several on a rank, the number of ranks.
        microbatches: m, the microbatches of a batch.
        rule: another version rule than the method's; of an order of your own "flush" if None.
        order: another order than the method's.
        options: of the order, such as {"chunks": 4}.
        decides: whether all stages decide together before each update, as clipping, loss scales and parallel pipelines
            need. A `Pipeline` adds that by itself.
        window: the number of messages that may be outstanding on a connection; the least that costs no time if None.
        sharding: what parallel pipelines split of the state of each stage: "none", "optimizer", "gradients" or "full",
            also with options, as in "full:weights=3"; that of the method if None.

    Raises:
        ConfigError: unknown method, order or rule, or choices that cannot go together.
        ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
    """
    chosen = None if callable(method_or_order) else method_or_order
    if isinstance(chosen, str):
        chosen = written_method(chosen)
    if isinstance(chosen, Method):
        chosen = own_choice(chosen)
    if chosen is not None:
        options = {**chosen.options, **options}
    if options.get("in_flight") in (AUTO, AUTO_DELAYED):
        raise ConfigError(
            f"make_schedule knows no links, so in_flight={options['in_flight']!r} finds nothing; give numbers (for "
            "given times: penstock simulate --in-flight auto --latency), or give the method itself to a Pipeline"
        )
    asked = chosen.name if chosen is not None else method_or_order
    assert not isinstance(asked, MethodChoice)
    request = ScheduleRequest(asked, stages, microbatches, rule, order, options, decides, window, sharding)
    return ProvenSchedule.of(request.prove(), chosen if rule is None else None)


def check(schedule: Schedule | ProvenSchedule | str) -> ProvenSchedule:
    """Prove a schedule, given as such or in its text form; one that is proven stays as it is.

    Raises:
        ConfigError: it is none.
        ScheduleError: it is wrong; the message names the action and the reason.
    """
    if isinstance(schedule, ProvenSchedule):
        return schedule
    if not isinstance(schedule, Schedule | str):
        raise ConfigError(f"check takes a schedule, or its text form; got {in_brief(schedule)}")
    return ProvenSchedule.of(proofs.check(parse_schedule(schedule) if isinstance(schedule, str) else schedule))


def load_schedule(
    path: Path | str, stages: int | None = None, microbatches: int | None = None, **options: int
) -> ProvenSchedule:
    """Load the schedule in a file and prove it.

    Args:
        path: `*.py` with a function (stages, microbatches, *, options) that returns an order: the one called `order`,
            or the only function. `*.csv` as `torch.distributed.pipelining` writes it. Otherwise, the text form, as
            `ProvenSchedule.save` writes it.
        stages, microbatches, options: arguments of the function; the other forms hold a finished schedule, which takes
            none.

    Raises:
        ConfigError: the file cannot be read, its function fails or lacks arguments, or it takes none and some are
            given.
        ScheduleError: the schedule is wrong; the message names the action at fault.
    """
    return ProvenSchedule.of(prove_file(Path(path), stages, microbatches, options))
