"""The benchmark of steps that are launched ahead: its device is busy for as long as it says."""

import pytest

from benchmarks.overlap import VOCAB_SIZE, StandIn, WaitedFor, seconds_per_step

STEP = 0.004


@pytest.mark.parametrize(("device", "overlap"), [(StandIn, "on"), (WaitedFor, "off")])
def test_a_step_takes_no_less_than_the_device(device, overlap):
    assert seconds_per_step(device(STEP), overlap, 3, 20, VOCAB_SIZE, 24) > 0.97 * STEP
