"""Stages of a model run one at a time, timed, and counted in bytes."""
