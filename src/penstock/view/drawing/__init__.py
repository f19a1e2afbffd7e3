"""Parts of the drawings of timelines: passes, colours and patterns, legends, arrows."""
