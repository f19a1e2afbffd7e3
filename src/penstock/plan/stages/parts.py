"""The names of the parts of a stage's time, as costs rate it and tables show it."""

COMPUTE = "compute"
LINKS = "links"
SUMS = "gradient sums"
COPIES = "copies"
CORES = "shared cores"
UPDATES = "updates"
BUBBLE = "bubble"

PARTS = (COMPUTE, LINKS, SUMS, COPIES, CORES, UPDATES, BUBBLE)
"""In the order in which they are shown."""
