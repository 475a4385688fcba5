"""The fenced code blocks of a page, and running them: the examples must give the printed output."""

import doctest
import re


def blocks_of(path):
    """(language, code, line) of each fenced block."""
    text = path.read_text()
    return [
        (found[1], found[2], text.count("\n", 0, found.start(2)))
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    ]


def run_blocks(path, blocks, names):
    """Runs Python blocks as they are; a block with prompts must print what the page prints."""
    for language, code, line in blocks:
        if language == "python":
            exec(compile("\n" * line + code, path.name, "exec"), names)
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(code, names, path.name, str(path), line)
            said = []
            failed, tried = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
            assert tried and not failed, "".join(said)
            names.update(test.globs)
    return names
