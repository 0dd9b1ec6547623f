"""Which batch size, and which convolution algorithm for each layer: equations 2 to 6 of arXiv 1709.06622."""
