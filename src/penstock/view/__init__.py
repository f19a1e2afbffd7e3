"""Room 9: what people see: terminal drawings, SVG, traces, progress."""
