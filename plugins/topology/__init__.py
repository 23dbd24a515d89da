"""Where the GPUs lie: probes that describe nodes, and the placement of ranks that follows from them."""
