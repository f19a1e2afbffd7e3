"""Commands about runs that have not begun: how fast they could be, and one rank alone."""
