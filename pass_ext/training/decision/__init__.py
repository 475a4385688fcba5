"""``train-decision``: a model that says which requests still draft."""
