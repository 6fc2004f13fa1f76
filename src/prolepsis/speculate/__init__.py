"""Guessing the tokens that come next, so that one pass of the target can settle several."""
