"""What every page and server of the package checks before a request reaches it: who asks, and how much is sent."""
