"""Output for people: terminal drawings, SVG, pages, traces, progress."""
