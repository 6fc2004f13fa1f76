"""Speed of this engine and of its peers on the same file, the same tokens and the same threads."""
