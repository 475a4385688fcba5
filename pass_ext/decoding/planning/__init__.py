"""Plans the tree of a step that gives the most tokens per second.

step_times.py: t(rows), measured. hit_rates.py: the chance that a candidate is right. lookahead_tree.py, draft_tree.py: the
search for the best tree by both. plan.py: ``pass_ext.drafting.plan``.
"""
