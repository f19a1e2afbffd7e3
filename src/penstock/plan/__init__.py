"""Plans: how a profiled model is cut into stages for so many devices, by the planners of papers and by a better one."""
