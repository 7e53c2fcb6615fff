"""Small real shell tasks, worked on by mini-swe-agent or by a script on the `openai` client."""
