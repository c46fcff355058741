"""Rules, principals, and what they grant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.rights import Access, Need, Principal, Rule
from escrowmq.rights.rules import ROLES

names = st.text("abc.-_", max_size=4)
rules = st.builds(Rule, st.sampled_from([Access.SEND, Access.ACT]), names, st.booleans())
needs = st.builds(Need, st.sampled_from([Access.SEND, Access.ACT]), names.filter(bool))


@pytest.mark.parametrize("text", ["send orders", "send orders*", "consume *", "view", "admin", "act a.b-c_D"])
def test_a_rule_is_written_as_it_is_read(text):
    assert str(Rule.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sned orders", "did you mean 'send'"),
        ("send", "needs one name"),
        ("send a b", "needs one name"),
        ("send a*b", "needs one name"),
        ("send **", "needs one name"),
        ("send .*x", "needs one name"),
        ("send ä", "needs one name"),
        ("view orders", "has no name"),
        ("admin *", "has no name"),
    ],
)
def test_what_is_no_rule_is_named(text, problem):
    with pytest.raises(ValueError, match=problem.replace("*", r"\*")):
        Rule.parse(text)


def test_a_prefix_covers_names_that_begin_with_it_and_not_the_other_way_round():
    rule = Rule.parse("send orders*")
    assert rule.grants(Need(Access.SEND, "orders"))
    assert rule.grants(Need(Access.SEND, "orders.eu"))
    assert not rule.grants(Need(Access.SEND, "order"))
    assert not rule.grants(Need(Access.SEND, "my-orders"))
    assert not rule.grants(Need(Access.READ, "orders"))


def test_without_a_star_the_name_must_be_equal():
    rule = Rule.parse("send orders")
    assert rule.grants(Need(Access.SEND, "orders"))
    assert not rule.grants(Need(Access.SEND, "orders2"))
    assert not rule.grants(Need(Access.SEND, "ORDERS"))


@given(rules, rules, needs)
def test_a_rule_that_includes_another_grants_what_that_grants(one, other, need):
    if one.includes(other) and other.grants(need):
        assert one.grants(need)


@given(st.lists(rules, max_size=4), st.lists(needs, max_size=4))
def test_a_principal_has_a_right_if_and_only_if_a_rule_grants_it(held, wanted):
    principal = Principal("p", tuple(held))
    for _ in range(2):  # the second time it is remembered
        missing = principal.missing(wanted)
        lacking = [need for need in wanted if not any(rule.grants(need) for rule in held)]
        assert missing == (lacking[0] if lacking else None)


def test_no_role_but_admin_may_administer():
    for name, granted in ROLES.items():
        assert (Rule(Access.ADMIN) in granted) == (name == "admin")
