"""Where the policy is computed: behind one contract, several engines."""
