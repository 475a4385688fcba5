import torch, pytest
from pass_ext.decoding.loop.host_step import HostStep
from dataclasses import replace
true = HostStep._batch
def _batch(self, *, drafts):
    batch = true(self, drafts=drafts)
    taps = [t for d in self._drafting.drafters for t in getattr(d, 'taps', ())]
    if not taps: return batch
    model = self._context.target.model
    seen = self.__dict__.setdefault('_seen', [0]*len(batch.texts))
    hidden = []
    for b, text in enumerate(batch.texts):
        st = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        h = torch.stack([st[t if t != 'last' else -1][0] for t in taps], 1)
        new = h[seen[b]:] if batch.remaining[b] else h[:0]
        seen[b] += len(new)
        hidden.append(new)
    return replace(batch, hidden=hidden)
HostStep._batch = _batch
