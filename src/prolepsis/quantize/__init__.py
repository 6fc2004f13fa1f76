"""Jobs that make a quantised model."""
