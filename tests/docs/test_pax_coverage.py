"""docs/pax_coverage.md says what the code has: each class and option of Pax's, once."""

from tests.support.every_case import assert_each
from tests.support.goldens import golden
from tests.support.pax_coverage import (
    ABSENT,
    ACTIVATION_NAMES,
    AS,
    COUNTERPARTS,
    PAGE,
    WITHOUT,
    activation_exists,
    found,
    options_here,
    options_of,
    our_class,
    page,
    pax_layers,
    setting_exists,
)

COVERED = sorted(name for name in pax_layers() if our_class(name) is not None)


def test_every_class_is_covered_an_activation_or_absent_for_a_reason():
    groups = (COVERED, ACTIVATION_NAMES, ABSENT)
    for name in pax_layers():
        assert sum(name in group for group in groups) == 1, name
    for name in {*ABSENT, *ACTIVATION_NAMES, *COUNTERPARTS}:
        assert name in pax_layers(), f"Pax has no {name}"
    assert all(map(activation_exists, ACTIVATION_NAMES))
    assert COUNTERPARTS.keys() <= set(COVERED)


def test_every_option_is_a_setting_or_has_a_reason():
    assert_each(check_options, ((name, name) for name in COVERED))


def check_options(name):
    for option, reason in options_here(name).without.items():
        assert reason is not None, f"say in AS or WITHOUT what {option} is"
    for option in options_of(name):
        if ours := found(AS, name, option):
            assert all(setting_exists(name, word) for word in ours.split(", ")), (option, ours)


def test_no_entry_is_stale():
    for table in (AS, WITHOUT):
        for name, option in table:
            names = [name] if name != "*" else COVERED
            used = [item for item in names if option in options_of(item)]
            assert used, (name, option)
            same = [option in options_here(element).same for element in used]
            assert not any(same), f"{(name, option)} is a setting of the same name by now"


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.support.pax_coverage"


def test_the_goldens_classes_are_in_it():
    """But for Linear and Transformer, under which cases.json has the schedules of these names."""
    defaults = golden("pax/cases.json")["class_defaults"]
    of_layers = defaults.keys() & pax_layers().keys() - {"Linear", "Transformer"}
    assert len(of_layers) > 50
    for name in of_layers:
        assert set(defaults[name]) <= set(pax_layers()[name]["options"]), name
