"""The data of a rank: batches as loaders yield them, divided into microbatches."""
