"""The blocks of a stage: run on weights and inputs, in their precision, with their random numbers and their loss."""
