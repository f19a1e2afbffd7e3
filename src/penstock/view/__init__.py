"""What people see: terminal drawings, SVG, pages, traces, progress."""
