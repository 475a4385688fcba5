"""The public functions of the ops: in ``pass_ext`` itself, or in one of the modules beside it."""

import pass_ext
from pass_ext import distributed, drafting, layers


def face_of(op):
    """The module that offers an op; None for a gradient."""
    return next((face for face in (pass_ext, layers, drafting, distributed) if op in face.__all__), None)


def function_of(op):
    """The public function of an op; None for a gradient."""
    return getattr(face_of(op), op, None)
