"""Where weights live: buffers with epochs, older versions, scratch memory."""
