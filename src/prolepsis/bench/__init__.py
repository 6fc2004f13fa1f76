"""Speed of this engine, of its codec and of the peers of both, on the same data and the same threads."""
