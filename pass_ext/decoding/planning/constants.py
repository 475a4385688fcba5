"""The numbers that tune how many rows a step has, and their reasons. Limits of size stand beside what they limit, as do the
weights of ``next_tree_`` (csrc/core/next_tree.h)."""

# ---- the seconds of a step (step_times.py) ----

REMEMBERED = 8
"""Steps of a kind whose median counts: two slow ones among them change nothing."""
REMEMBERED_OF_ROWS = 3
"""The same for one number of rows, beside all steps: times are no straight line between the measured numbers."""
FEWEST_PLAIN = 2
"""Plain steps that tell something: of one alone nobody knows whether it was a slow one, beside which drafting looks cheap."""
FEWEST_DRAFTED = 4
"""Drafted steps whose median tells something, where plain ones are known. Of fewer the fastest does, for the first are slow:
memory is allocated."""
OLDEST = 20.0
"""Seconds after which a step is forgotten: the machine may be busy or idle meanwhile, and what looked dear is tried again."""

STILL_AS_SLOW = 0.85
"""Share of their time beside the last plain steps below which drafted ones are faster: chance moves a median of eight less."""

# ---- whether drafting pays (pace.py) ----

MOST_LOST = 3.0
"""Plain steps' time that drafting may lose before it pauses: by chance alone, good drafts lose it once in hundreds of steps."""
MOST_LOST_AGAIN = 1.5
"""The same of a trial after a pause: drafts that have become right win in its first steps."""
PAUSED = 32
"""Plain steps of a pause for each that was lost, so that 256 tokens hold two trials: wrong drafts cost 3 % of them, or 5 %
where a drafted step takes as long as three plain ones."""
LONGEST = 18.0
"""Lost steps for which the longest pause stands, of trials that lose fewer: pauses double up to it."""

# ---- the cost of a row (pace.py) ----

PLANNED_STEPS = 16
"""Steps that the plan's tokens per second count for, before a text has shown its own."""
KEPT = 0.97
"""Share of the tokens and seconds so far that each step keeps: the last 30 or so say how fast the text is."""
COSTED_EVERY = 8
"""Steps between two costs: computing them takes the host longer than they change."""

# ---- which rows there are (drafting) ----

MOST_ROWS = 32
"""Rows of a request where they have a cost; more never paid on a CPU."""
FEWEST_CHOSEN = 5
"""Rows below which all places take nearly the same, so that the plan's are as good."""

# ---- plans ----

ASSUMED_RATE, ASSUMED_FALL = 0.35, 0.5
"""Hit rate of the best candidate where nothing was counted, and of each further rank against the one before."""
MOST_PLANNED_ROWS = 64
"""Rows of a draft model's tree: the most that step times are measured at."""
