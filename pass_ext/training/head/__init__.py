"""``train-head``: an EAGLE-3 head for a model of the user's."""
