"""Plans whose schedule is chosen together with the cut into stages."""
