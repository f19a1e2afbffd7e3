"""Memory optimizations chosen together with the division into stages, stage by stage, as in Mist."""
