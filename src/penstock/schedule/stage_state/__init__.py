"""The state of a stage, which the proof and the runtime keep: versions, gradients, microbatches in flight."""
