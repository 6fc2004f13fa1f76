"""The demonstration: a question about a document, and a KV cache that leaves the process and comes back bit for bit."""
