"""``Recorded``: a method that drafts as another one does, and keeps what was proposed; ``PauseAt``: a pace by the number of the
step."""

from pass_ext.drafting import drafters_of


class Recorded:
    """A method of ``generate``. Of its last generation it has ``steps``: each one's texts, and its candidates for them.

    pace: at which the first drafter of the method, whose candidates these are, drafts; None: at its own.
    """

    def __init__(self, method, pace=None):
        self.method, self.pace, self.steps = method, pace, []

    def drafters(self, context):
        first, *others = drafters_of(self.method, context)
        propose, self.steps = first.propose, []

        def recorded(batch):
            proposal = propose(batch)
            self.steps.append(([list(text) for text in batch.texts], proposal.candidates))
            return proposal

        first.propose, first.pace = recorded, self.pace or first.pace
        return [first, *others]

    def of(self, request=0):
        """``(text, candidates)`` of each step that drafted for a request."""
        own = ((texts[request], parts[request]) for texts, parts in self.steps)
        return [(text, candidates) for text, candidates in own if candidates is not None]

    def tokens(self, request=0):
        """The drafts of each such step."""
        return [list(candidates.tokens) for _, candidates in self.of(request)]


class PauseAt:
    """A pace that drafts but at the steps of these numbers."""

    def __init__(self, pauses):
        self.pauses, self.step = pauses, 0

    def may_draft(self):
        return self.step not in self.pauses

    def add(self, *given, **named):
        self.step += 1

    def costs(self, *given):
        return None
