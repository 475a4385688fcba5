"""The loops that decode one batch: ``waiting.py`` reads every step on the host before it begins the next one, ``ahead.py``
begins the next step first. ``choice.py`` chooses."""
