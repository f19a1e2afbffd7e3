"""Sequential reference: what each method computes, one microbatch after the other in one process.

It is written from the equations of the papers and shares no code with the schedules, the weight store or the runtime,
which are tested against it. W(t) are the weights after t batches (version t), f_t is the mean loss of batch t, opt is
one step of the optimizer, which has one state whatever the method; s of d is the stage, counted from 0.

    flush   W(t+1) = opt(W(t), grad f_t(W(t)))
            GPipe (Huang et al., arXiv 1811.06965); PipeDream-Flush (Narayanan et al., arXiv 2006.09503, sec. 3.2);
            DAPPLE (Fan et al., arXiv 2007.01045); and all methods that only run the same passes in another order, on
            more stages or in two directions (`parts`). The order changes no number. Slices of sequences compute the
            same sums in parts, which changes the last bits.
    2bw     W(t+1) = opt(W(t), grad f_t(W(max(t-1, 0))))
            2bw, 2bw-eager: PipeDream-2BW (arXiv 2006.09503, sec. 3.1 and 3.3): a delay of one on every stage, whatever
            the order.
    3bw     W(t+1) = opt(W(t), grad f_t(W(max(t-2, 0))))
    stash   W(t+1) = opt(W(t), grad f(W_0(v_0), ..., W_{d-1}(v_{d-1})))
            PipeDream (Harlap et al., arXiv 1806.03377): each stage runs a microbatch forward on its newest version and
            backward on the same, without vertical sync. In 1F1B the forward of the span's microbatch number g follows
            g - (d-1-s) backwards of that stage, and each m of them make a version:
            v_s(g) = floor(max(0, g - (d-1-s)) / m), counted from the span's first version.
    vertical-sync
            As stash, but every stage reads the version that the first stage read: v_0(g).
    newest  As stash, but the backward uses the newest weights, those of version t, wherever its formulas have weights;
            the activations in them are those that the forward saved. It is not the gradient of any function.
            PipeMare without its corrections (Yang et al., arXiv 1910.05124); AMPNet, FTPipe's stale pipeline.
    timeprest, v-timeprest
            newest in the order nF1B: one backward for all microbatches of a batch. Its forwards read, on stage s, the
            weights of min(b, d-1-s) updates before, b being the number of the batch in its span (TiMePReSt, Dutta et
            al., arXiv 2410.14312; V-TiMePReSt, arXiv 2509.23241, which differs from it in what m may be).
    i-timeprest
            As timeprest, but the backward reads weights between those of its forward and the newest (`Blend`;
            I-TiMePReSt, arXiv 2509.23241).

The delays of 1F1B and nF1B are derived in `delays`; those of other orders may be given instead.

Corrections of the delay (`corrections`, `predictions`), with m microbatches to an update:

    pipemare                    newest, T1 (`Rescheduling`) and T2 (`Discrepancy`); with recompute
                                (`ReferenceOrder.recompute`) T2 also estimates the weights of recomputed forwards
    spectrain                   forward and backward read two predictions (`Prediction`) by floor(s/2) + d-s-1 and by
                                floor(s/2) updates over m, rounded half to even (arXiv 1809.02839; m > 1 is our
                                interpretation)
    spectrain-stash             forward and backward read one prediction by d-s-1 updates over m (the authors' code)
    xpipe                       predictions by (d+m-s/2-2)/m and (m+floor(s/2)-1)/m updates, rounded half to even; all
                                microbatches of a batch use the prediction of its first one (arXiv 1911.04610)
    pipeoptim                   forward as spectrain-stash, backward on the newest weights (arXiv 2312.00839)
    error-feedback              2bw; each update corrects the error of the previous one (`Feedback`)

    2bw-ahead, 3bw-ahead        2bw and 3bw, whose passes read W(t) predicted when W(t-1), W(t-2) is made (`Ahead`)

Pipelines that make their own updates and exchange the sums of waves of them are in `waves` (HetPipe's WSP).

Global decisions are made once per batch, on the gradient of all stages together (Megatron-LM, GPipe and others do so
after a flush; the equations need none):

    clipping        grad f_t times min(1, clip / (norm + 1e-6)), where norm is the Euclidean norm of grad f_t
                    (torch.nn.utils.clip_grad_norm_).
    loss scaling    grad f_t is computed of S_t f_t and divided by S_t; if it is not finite, W(t+1) = W(t) and opt is
                    not called (Micikevicius et al., arXiv 1710.03740). S_t depends on the batches whose update is made
                    before the last stage begins batch t: all up to t-1, with 2bw up to t-2, with 3bw to t-3. A
                    batch that overflows lowers the scale unless it has been lowered since; `interval` finite batches
                    in a row under the present scale raise it.

A skipped update leaves everything as it is: weights, delta, velocities, the previous update, and the number of updates,
on which learning rates depend. Numbers are rounded as the formulas are written, products before sums, without fused
operations.
"""

from penstock.verify.reference.corrections import Newest
from penstock.verify.reference.decisions import Scaling
from penstock.verify.reference.delays import largest_delay, mean_delay
from penstock.verify.reference.method_to_stage import ReferencePlace
from penstock.verify.reference.order_delays import ReferenceOrder
from penstock.verify.reference.predictions import ReferencePrediction, check_velocity
from penstock.verify.reference.run import Reference, train_reference
from penstock.verify.reference.stage import ReferenceReading, ReferenceStage
from penstock.verify.reference.supported_methods import DOUBLE_BUFFER, FLUSH, METHODS
from penstock.verify.reference.waves import ReferenceWaves, Wsp, train_wsp

__all__ = [
    "DOUBLE_BUFFER",
    "FLUSH",
    "METHODS",
    "Newest",
    "Reference",
    "ReferenceOrder",
    "ReferencePlace",
    "ReferencePrediction",
    "ReferenceReading",
    "ReferenceStage",
    "ReferenceWaves",
    "Scaling",
    "Wsp",
    "check_velocity",
    "largest_delay",
    "mean_delay",
    "train_reference",
    "train_wsp",
]
