"""The machine model: messages, lanes and collectives, played without times."""
