"""What a task's answers are worth: voting, metrics, sandboxes and calibration."""
