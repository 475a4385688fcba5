"""``each``: a test that goes through the values of an argument by itself, for cases that take a millisecond or two: as tests of
their own they cost pytest five.
"""

import functools
import inspect


def each(name, values):
    """Runs a test once for each value of this argument; a failing test's output ends with the value that it failed for."""

    def decorate(test):
        @functools.wraps(test)
        def run(**arguments):
            for value in values:
                print(f"{name}: {value}")
                test(**arguments, **{name: value})

        signature = inspect.signature(test)
        left = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        run.__signature__ = signature.replace(parameters=left)
        return run

    return decorate
