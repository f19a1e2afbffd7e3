"""How ranks run: the loop over bound actions, who waits, evaluations between batches."""
