"""Text corpora and the samples drawn from them."""
