"""Setting up a real network: a Flower app folder, keys for a trial, the trial itself, and a node's model for use."""
