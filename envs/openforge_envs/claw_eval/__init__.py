"""Tasks in ClawEval's format: two of our own, or those of a checkout."""
