"""The actions of a rank, bound once per executor: one module for each family of operations."""
