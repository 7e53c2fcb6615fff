"""Run files and what is known of runs."""
