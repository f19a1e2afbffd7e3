"""Plans without stages: all devices run one layer after the other, each divided among them in its own way."""
