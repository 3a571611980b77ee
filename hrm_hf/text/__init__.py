"""Language models: the server in front of them (`serving.py`)."""
