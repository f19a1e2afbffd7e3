"""Room 6: stages, transports, executors and the engine."""
