"""One rank of a run of several processes: ``ranks_job.py FILE`` runs the command lines of a JSON file, with what is planted in
them, and writes how each ended into FILE.RANK. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as torchrun does.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from pass_ext.__main__ import main
from pass_ext.training.lookahead.loop import LookaheadTrainer

RANK = int(os.environ["RANK"])
LOSS = LookaheadTrainer.loss


def raising(trainer, step):
    if RANK == 1 and step == 7:
        raise RuntimeError("planted in rank 1")
    return LOSS(trainer, step)


def terminated(trainer, step):
    if RANK == 1 and step == 9:
        os.kill(os.getpid(), signal.SIGTERM)
    return LOSS(trainer, step)


PLANTED = {"raises": raising, "SIGTERM": terminated, "": LOSS}

torch.set_num_threads(1)
ends = []
for planted, port, line in json.loads(Path(sys.argv[1]).read_text()):
    LookaheadTrainer.loss = PLANTED[planted]
    os.environ["MASTER_PORT"] = str(port)  # the store of the line before may still listen
    try:
        ends.append(main(line))
    except SystemExit as end:
        ends.append(end.code)
    except RuntimeError as error:
        ends.append(f"RuntimeError: {error}")
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(ends))
