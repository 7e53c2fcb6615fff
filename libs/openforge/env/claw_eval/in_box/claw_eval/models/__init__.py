"""What a grader is given."""
