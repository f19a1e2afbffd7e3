"""The forward and backward of one stage: its module, its graphs, the weights that its passes read."""
