"""The commands and the numbers of docs/clusters.md are those of the recipes and of the program."""

import re

from praxis_lite.main import MODES
from praxis_lite.modes.on_clusters import Grace
from praxis_lite.modes.options import parse_command_line
from praxis_tools.elastic.decisions import MAX_FRUITLESS
from praxis_tools.elastic.liveness import IN_STORE, ON_DISK
from tests.clusters.recipes import CLUSTERS
from tests.clusters.test_jobset import CONTAINER, JOB, POD, SPEC
from tests.clusters.test_slurm import directives
from tests.support.doc_pages import page

PAGE = page("clusters").text
TEXT = " ".join(PAGE.split())
COMMANDS = [words for words in page("clusters").commands("praxis") if words[0] in MODES]


def test_the_command_lines_are_read_by_the_program():
    assert len(COMMANDS) >= 3
    for command in COMMANDS:
        words = [word.replace("process_id=K", "process_id=3") for word in command]
        parse_command_line(words, MODES)


def test_the_recipes_are_all_there_and_named():
    names = {path.name for path in CLUSTERS.iterdir() if path.is_file()}
    linked = set(re.findall(r"\(\.\./clusters/([\w.]+)\)", PAGE))
    assert names - {"Dockerfile.dockerignore"} == linked


def test_the_numbers_are_those_of_the_program():
    silent = f"{ON_DISK.silent:.0f} s without a heartbeat, or {IN_STORE.silent:.0f} s"
    assert f"after at most {silent}" in TEXT
    assert f"after {MAX_FRUITLESS} failures in a row the job ends" in TEXT
    assert f"--signal={directives(CLUSTERS / 'slurm.sbatch')['signal']}" in TEXT
    assert f"terminationGracePeriodSeconds: {POD['terminationGracePeriodSeconds']}" in TEXT
    assert f"`backoffLimitPerIndex: {JOB['backoffLimitPerIndex']}`" in TEXT
    assert {10: "ten times"}[SPEC["failurePolicy"]["maxRestarts"]] in TEXT
    for kind in ("liveness", "readiness"):
        probe = CONTAINER[f"{kind}Probe"]["exec"]["command"][-1]
        assert f"`{probe.replace('/health', 'DIR')}`" in TEXT


def test_the_warning_is_the_programs_own_with_its_arithmetic(caplog):
    grace = Grace(300)
    grace.restore({"step_seconds": 20.1, "save_seconds": 185.5})
    grace.before_training(None, None)
    shown = TEXT[TEXT.index("WARNING: ") : TEXT.index(" ... A job that is killed")]
    assert f"WARNING: {caplog.messages[0]}".startswith(shown)
