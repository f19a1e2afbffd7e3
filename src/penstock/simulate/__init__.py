"""The simulator: predicts the timeline of a schedule from costs. Never imports torch."""
