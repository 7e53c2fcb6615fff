"""What a grader is."""
