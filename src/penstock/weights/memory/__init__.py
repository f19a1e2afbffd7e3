"""Memory for weights: buffers with epochs, older versions, scratch memory."""
