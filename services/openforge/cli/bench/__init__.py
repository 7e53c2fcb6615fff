"""What things cost, measured on this machine."""
