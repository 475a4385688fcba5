"""The cost model of decoding. ``step_times.py``: the seconds of a step. ``pace.py``: whether drafting pays, the cost of rows.
``plan.py``: the best tree by hit rates and times. ``calibration.py``: a draft model's hit rates. ``constants.py``: numbers."""
