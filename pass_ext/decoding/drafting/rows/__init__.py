"""Which rows of a step pay.

pace.py: pauses while drafting loses time. share.py: shares a batch's rows among its requests, by chances.py (how likely a
candidate is right) and batch_seconds.py (how long a step takes); shared.py brings these together. choice.py: what the device
chooses rows by.
"""
