"""The cost model of decoding. ``step_times.py``: what a step takes. ``pace.py``: whether drafting pays, and what rows cost.
``plan.py``: the best tree by hit rates and times. ``calibration.py``: a draft model's hit rates. ``constants.py``: numbers."""
