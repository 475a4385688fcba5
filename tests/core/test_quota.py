"""The quota of a container, csrc/cpu/quota.h: from files as Linux shows them, and in a real cgroup where one can be made."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.native import ROOT, build_module, quote

NONE = 2**31 - 1
V1, V1_TOP = "9:name=systemd:/\n4:cpu,cpuacct:{}\n0::/\n", "sys/fs/cgroup/cpu"
V2, V2_TOP = "0::{}\n", "sys/fs/cgroup"


@cache
def built():
    flags = f"-O1 -Wall -Wextra -I{quote(ROOT / 'csrc')}"
    return build_module("_quota", {ROOT / "tests" / "core" / "quota.cpp": ""}, flags)


def processors(root, groups, files):
    """What a process of these cgroups may use, by files of the system."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return built().processors_of_quota(str(root))


@pytest.mark.parametrize(
    ("maximum", "expected"),
    [
        ("max 100000\n", NONE), ("50000 100000\n", 1), ("100000 100000\n", 1), ("100001 100000\n", 2), ("250000 100000\n", 3),
        ("1000 100000\n", 1), ("400000\n", NONE), ("", NONE), ("none at all\n", NONE), ("90000000000000 1000\n", NONE),
    ],
)  # fmt: skip
def test_cpu_max(tmp_path, maximum, expected):
    assert processors(tmp_path, V2.format("/pod/box"), {f"{V2_TOP}/pod/box/cpu.max": maximum}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", NONE), ("50000\n", 1), ("150000\n", 2), ("", NONE)])
def test_quotas_of_version_1(tmp_path, quota, expected):
    files = {f"{V1_TOP}/box/cpu.cfs_quota_us": quota, f"{V1_TOP}/box/cpu.cfs_period_us": "100000\n"}
    assert processors(tmp_path, V1.format("/box"), files) == expected


def test_the_smallest_quota_above_a_process_counts(tmp_path):
    quotas = {f"{V2_TOP}/a/b/c/cpu.max": "800000 100000\n", f"{V2_TOP}/a/b/cpu.max": "max 100000\n"}
    assert processors(tmp_path, V2.format("/a/b/c"), quotas) == 8
    assert processors(tmp_path, V2.format("/a/b/c"), {f"{V2_TOP}/a/cpu.max": "300000 100000\n"}) == 3
    assert processors(tmp_path, V2.format("/a/b/c"), {f"{V2_TOP}/cpu.max": "200000 100000\n"}) == 2


@pytest.mark.parametrize("path", ["/", "/docker/0123456789", "/../../docker/0123456789"])
def test_a_container_that_sees_its_own_cgroup_at_the_top(tmp_path, path):
    """The path may be the host's, which is not there."""
    assert processors(tmp_path, V2.format(path), {f"{V2_TOP}/cpu.max": "50000 100000\n"}) == 1
    quota = {f"{V1_TOP}/cpu.cfs_quota_us": "250000\n", f"{V1_TOP}/cpu.cfs_period_us": "100000\n"}
    (tmp_path / V2_TOP / "cpu.max").unlink()
    assert processors(tmp_path, V1.format(path), quota) == 3


@pytest.mark.parametrize("groups", ["", "no lines of cgroups\n", "3:cpuset:/box\n", "1:\n::\n"])
def test_other_files_limit_nothing(tmp_path, groups):
    files = {f"{V1_TOP}/box/cpu.cfs_quota_us": "50000\n", f"{V1_TOP}/box/cpu.cfs_period_us": "100000\n"}
    assert processors(tmp_path, groups, files) == NONE
    (tmp_path / "proc/self/cgroup").unlink()
    assert built().processors_of_quota(str(tmp_path)) == NONE


@pytest.fixture
def half_a_processor():
    """The file by which a process enters a cgroup with this quota."""
    files = {"cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}, ".": {"cpu.max": "50000 100000"}}
    for top, texts in files.items():
        group = Path("/sys/fs/cgroup", top, f"pass_ext_test_{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if all((group / name).exists() for name in texts):
                for name, text in texts.items():
                    (group / name).write_text(text)
                yield group / "cgroup.procs"
                return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no cgroup with a quota can be made here")


THREADS = """
import os, sys, torch
from pathlib import Path
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(str(os.getpid()))
import pass_ext
torch.set_num_threads(3)
print(pass_ext._library.thread_count())
"""


def test_half_a_processor_has_one_thread(half_a_processor):
    """Two of them would use up the time of a period, while they wait for each other, and then stand still."""
    run = [sys.executable, "-c", THREADS]
    here = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout
    there = subprocess.run([*run, half_a_processor], capture_output=True, text=True, check=True, timeout=120).stdout
    assert int(there) == 1 <= int(here) <= 3
