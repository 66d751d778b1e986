from __future__ import annotations

from tests.canary_steps import check_rule


def test_the_named_cause_fires_and_noise_does_not():
    check_rule("DS209", "adapter_missing", "adapter_off")
