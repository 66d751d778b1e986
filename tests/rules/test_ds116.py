from __future__ import annotations

from driftscope.doctor import Facts, FeatureRow, Settings, StackTable, foresee


def codes(facts: Facts) -> tuple[str, ...]:
    return tuple(code for code in foresee(facts).rules if code in ("DS111", "DS116"))


def test_a_refused_configuration_is_critical_in_trls_own_words():
    facts = Facts(settings=Settings(refusal="ValueError: num_generations must divide\x1b[2J the batch"))
    (finding,) = (f for f in foresee(facts) if f.rule == "DS116")
    assert finding.severity == "critical"
    assert "num_generations must divide" in finding.evidence
    assert "\x1b" not in finding.evidence


def test_an_accepted_one_is_not():
    assert codes(Facts(settings=Settings())) == ()
    assert codes(Facts()) == ()


def test_an_option_that_the_probe_names_is_told_once():
    row = FeatureRow(feature="delta", path="liger", status="refused", message="no delta", in_use=True)
    table = StackTable(rows=(row,), live="liger", versions={}, seconds=0.0)
    assert codes(Facts(settings=Settings(refusal="ValueError: no delta"), stack=table)) == ("DS111",)
