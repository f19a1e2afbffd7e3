"""Clusters: how fast devices are, what they hold and how they are joined; a number with its source each."""
