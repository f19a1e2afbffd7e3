"""The public API: every name, and the module that it comes from."""

from .checkpoint.manager import Checkpoints as Checkpoints, Loaded as Loaded
from .comm.p2p.trees import Whole as Whole
from .errors import (
    CapabilityError as CapabilityError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    PenstockError as PenstockError,
    ScheduleError as ScheduleError,
    TransportError as TransportError,
    VersionError as VersionError,
)
from .idle_time import TimeSplit as TimeSplit, split_time as split_time
from .measure.recompute_choice import RecomputeChoice as RecomputeChoice, choose_recompute as choose_recompute
from .models.gpt import gpt_blocks as gpt_blocks, language_loss as language_loss
from .models.gpt_shape import GPTConfig as GPTConfig
from .options.parallelism import DataParallel as DataParallel, Microbatches as Microbatches, Partition as Partition
from .options.passes import Precision as Precision, Recompute as Recompute, Staleness as Staleness
from .options.run import Device as Device, Group as Group
from .options.updates import Divergence as Divergence
from .partition.blocks import LazyBlock as LazyBlock
from .partition.replay.auxiliary import auxiliary as auxiliary
from .partition.sequence_slices import Slicing as Slicing, equal_time_lengths as equal_time_lengths
from .proven_schedule import (
    ProvenSchedule as ProvenSchedule,
    check as check,
    load_schedule as load_schedule,
    make_schedule as make_schedule,
)
from .runtime.execute.evaluation_without_draining import Evaluating as Evaluating
from .runtime.malloc import keep_freed_memory as keep_freed_memory
from .runtime.pipeline import Pipeline as Pipeline
from .runtime.rank.batch_reports import Report as Report
from .runtime.rank.snapshot import Saving as Saving, Snapshot as Snapshot
from .runtime.rank.timeline_files import read_timeline as read_timeline
from .runtime.restore.saved_state import SavedState as SavedState
from .runtime.training_run import TrainingRun as TrainingRun
from .runtime.update.divergence import Trouble as Trouble
from .runtime.update.run_events import Evaluated as Evaluated, Evaluation as Evaluation
from .schedule.ir.order import Order as Order
from .schedule.ir.schedule import Schedule as Schedule, Stage as Stage
from .schedule.load import load_method as load_method
from .schedule.machine.shared_machine import SharedCores as SharedCores, SharedLinks as SharedLinks
from .schedule.methods.choice import MethodChoice as MethodChoice, method as method
from .schedule.methods.corrections import CorrectionSpec as CorrectionSpec, Option as Option
from .schedule.methods.data_parallel_sync import Combine as Combine
from .schedule.methods.method import Method as Method
from .schedule.proof.proof import Proof as Proof
from .schedule.text_parser import parse_schedule as parse_schedule
from .schedule.torch_csv import from_torch_csv as from_torch_csv, to_torch_csv as to_torch_csv
from .simulate.costs import Costs as Costs, StageCost as StageCost
from .simulate.simulate import Simulation as Simulation
from .timeline import Bubble as Bubble, Timeline as Timeline
from .view.perfetto import write_trace as write_trace
from .view.progress import summary as summary
from .view.svg import timeline_svg as timeline_svg
from .view.text import draw_timeline as draw_timeline
from .weights.corrections.base import Correction as Correction, Corrector as Corrector, StagePlace as StagePlace
from .weights.corrections.registry import correction_of as correction_of
from .weights.decision import Decision as Decision, LossScale as LossScale
from .weights.memory.buffers import Buffer as Buffer

__version__: str
