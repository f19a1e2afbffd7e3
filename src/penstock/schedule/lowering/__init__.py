"""Messages added to a schedule: SENDs, RECVs and windows, which make it what ranks run."""
