"""The shipped scaling rules on a simulated cluster: each tier by its own need, and no to and fro."""

from __future__ import annotations

import itertools
import math
import subprocess

import pytest
import yaml

from tests.k8s.autoscaler import SYNC_SECONDS, Autoscaler
from tests.k8s.scaled_cluster import DECODE_PAGES, PAGE_TOKENS, PREFILL_RATE, TURN, ScaledCluster, histogram_quantile
from tests.k8s.tools import K8S, debian_program

TIERS = ("prefill", "decode")


def autoscalers():
    return {
        manifest["metadata"]["name"].removeprefix("kvferry-"): Autoscaler(manifest)
        for manifest in yaml.safe_load_all((K8S / "components/autoscaling-hpa/hpa.yaml").read_text())
    }


class Run:
    """A load on a scaled cluster, and the number of replicas that were set over time."""

    def __init__(self, load, minutes, seed=1, change=lambda minute, cluster: None, scaled=True, **start):
        """load: (requests per second, prompt tokens, answer tokens) at a minute."""
        self.cluster = ScaledCluster(seed, **start)
        self.sizes = {tier: [] for tier in TIERS}
        scalers, rng = autoscalers(), self.cluster.rng
        for turn in range(int(minutes * 60 / TURN)):
            minute = turn * TURN / 60
            rate, prompt, answer = load(minute)
            arrivals = [
                (max(1, int(rng.expovariate(1 / prompt))), max(1, int(rng.expovariate(1 / answer))))
                for _ in range(poisson(rng, rate * TURN))
            ]
            self.cluster.turn(arrivals)
            change(minute, self.cluster)
            if scaled and turn % int(SYNC_SECONDS / TURN) == 0:
                values = self.cluster.values()
                for tier, scaler in scalers.items():
                    wanted, ready = self.cluster.wanted[tier], len(self.cluster.running(tier))
                    self.cluster.wanted[tier] = scaler.decide(self.cluster.now, wanted, ready, values)
            for tier in TIERS:
                self.sizes[tier].append(self.cluster.wanted[tier])

    def after(self, tier, minute):
        return self.sizes[tier][int(minute * 60 / TURN) :]

    @property
    def pod_hours(self):
        return self.cluster.pod_seconds / 3600


def poisson(rng, mean):
    count, product, limit = 0, rng.random(), math.exp(-mean)
    while product > limit:
        count, product = count + 1, product * rng.random()
    return count


def turns(sizes):
    """How often the direction of scaling changed."""
    steps = [b - a for a, b in itertools.pairwise(sizes) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("rate", [0.5, 2.0, 5.0, 9.0, 14.0])
def test_a_steady_load_is_not_answered_with_to_and_fro(rate):
    run = Run(lambda minute: (rate, 2000, 300), minutes=75)
    for tier in TIERS:
        settled = run.after(tier, 35)
        # On the line between two sizes it may go from one to the other, once in ten minutes or less.
        assert max(settled) - min(settled) <= 1, settled
        assert turns(settled) <= 4
    assert run.cluster.attainment() > 0.85


def test_prompts_make_prefill_grow_and_only_prefill():
    run = Run(lambda minute: (4.0, 8000, 20), minutes=60)
    assert 5 <= run.sizes["prefill"][-1] <= 8  # 32,000 tokens per second are the work of 4, seven tenths busy
    assert max(run.sizes["decode"]) <= 2


def test_answers_make_decode_grow_and_only_decode():
    run = Run(lambda minute: (4.0, 200, 2000), minutes=40)
    assert max(run.after("decode", 10)) >= 3
    assert max(run.sizes["prefill"]) == 1


def test_prefill_never_grows_because_decode_is_full():
    """Decode can't grow: its pods stay Pending, and thousands of requests wait for it."""

    def keep_decode(minute, cluster):
        cluster.wanted["decode"] = 1

    run = Run(lambda minute: (6.0, 500, 4000), minutes=30, change=keep_decode)
    assert len(run.cluster.queue) > 1000
    assert max(run.sizes["prefill"]) == 1


def test_pods_that_stay_pending_do_not_make_it_ask_for_more_and_more():
    run = Run(lambda minute: (8.0, 4000, 200), minutes=40, most_pods=4)
    needed = run.sizes["prefill"][-1]
    assert turns(run.after("prefill", 15)) <= 1
    assert needed <= 16  # maxReplicas: what is missing does not make it larger
    assert sum(map(len, run.cluster.tiers.values())) <= 4


def test_a_burst_is_answered_at_once_and_let_go_slowly():
    def load(minute):
        return (10.0 if 20 <= minute < 25 else 1.0, 3000, 150)

    run = Run(load, minutes=60)
    assert max(run.sizes["prefill"][int(23 * 60 / TURN) : int(26 * 60 / TURN)]) >= 4
    assert run.after("prefill", 45)[-1] == 1
    assert turns(run.sizes["prefill"]) <= 2


def test_what_a_person_sets_by_hand_comes_back_to_what_is_needed():
    def by_hand(minute, cluster):
        if minute == 20:
            cluster.wanted["prefill"] = 12
        if minute == 40:
            cluster.wanted["prefill"] = 1

    run = Run(lambda minute: (4.0, 4000, 150), minutes=60, change=by_hand)
    steady = run.sizes["prefill"][int(19 * 60 / TURN)]
    assert abs(run.sizes["prefill"][int(39 * 60 / TURN)] - steady) <= 1
    assert abs(run.sizes["prefill"][-1] - steady) <= 1


def test_a_daily_wave_costs_less_than_a_fleet_for_its_peak():
    def load(minute):
        return (5.5 - 5.0 * math.cos(minute / 240 * 2 * math.pi), 2500, 250)

    scaled = Run(load, minutes=240)
    print(f"\nattainment {scaled.cluster.attainment():.1%}")
    peak = {tier: max(scaled.sizes[tier]) for tier in TIERS}
    static = Run(load, minutes=240, scaled=False, **peak)
    print(
        f"{static.cluster.attainment():.1%} with {peak} all the time; "
        f"pod hours {scaled.pod_hours:.1f} against {static.pod_hours:.1f}"
    )
    assert scaled.cluster.attainment() > 0.95
    assert scaled.pod_hours < 0.75 * static.pod_hours
    for tier in TIERS:
        assert turns(scaled.sizes[tier]) <= 6  # in four hours


def test_many_short_chats_fill_sequences_before_pages():
    """Decode grows though its pages are nearly free; prefill does not grow for what waits because of that."""
    run = Run(lambda minute: (14.0, 300, 400), minutes=60)
    assert max(run.after("decode", 20)) >= 2
    assert max(run.sizes["prefill"]) <= 2
    assert run.cluster.attainment() > 0.85


class TestRules:
    """The recorded series as Prometheus itself computes them."""

    @pytest.fixture(scope="class")
    def promtool(self):
        return debian_program("prometheus", "usr/bin/promtool")

    @pytest.fixture
    def rules(self, tmp_path):
        spec = yaml.safe_load((K8S / "components/monitoring/rules.yaml").read_text())["spec"]
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
        return tmp_path / "rules.yaml"

    def test_they_are_well_formed(self, promtool, rules):
        done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "10 rules found" in done.stdout

    def check(self, promtool, rules, series, expected):
        """series: name with labels -> (at the start, per 15 s)."""
        test = {
            "rule_files": [str(rules)],
            "evaluation_interval": "15s",
            "tests": [
                {
                    "interval": "15s",
                    "input_series": [
                        {"series": name, "values": f"{start}+{step}x20"} for name, (start, step) in series.items()
                    ],
                    "promql_expr_test": [
                        {
                            "expr": name,
                            "eval_time": "4m",
                            "exp_samples": [{"labels": f'{name}{{namespace="n"}}', "value": value}],
                        }
                        for name, value in expected.items()
                    ],
                }
            ],
        }
        path = rules.with_name("test.yaml")
        path.write_text(yaml.safe_dump(test))
        done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_they_are_what_the_simulation_computes(self, promtool, rules):
        """Two prefill workers, half busy; 40,000 tokens wait for prefill, 10,000 for decode, which has two workers."""
        series = {
            'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="prefill"}': (0, 40_000 * 15),
            'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="decode"}': (0, 10_000 * 15),
        }
        for pod in ("p0", "p1"):
            labels = f'{{namespace="n",pod="{pod}",tier="prefill"}}'
            series[f"kvferry_step_seconds_sum{labels}"] = (0, 7.5)
            series[f"kvferry_prompt_tokens_per_second{labels}"] = (PREFILL_RATE, 0)
            series[f"kvferry_pages_total{labels}"] = (1000, 0)
        for pod, free in (("d0", 5000), ("d1", 10_000)):
            labels = f'namespace="n",pod="{pod}",tier="decode"'
            series[f"kvferry_pages_total{{{labels}}}"] = (DECODE_PAGES, 0)
            series[f"kvferry_page_tokens{{{labels}}}"] = (PAGE_TOKENS, 0)
            series[f'kvferry_pages{{{labels},owner="free"}}'] = (free, 0)
            series[f'kvferry_pages{{{labels},owner="cached"}}'] = (1000, 0)
            series[f"kvferry_expected_growth_pages{{{labels}}}"] = (500, 0)
            series[f'kvferry_sequences{{{labels},state="running"}}'] = (100, 0)
            series[f'kvferry_sequences{{{labels},state="receiving"}}'] = (28, 0)
            series[f"kvferry_max_sequences{{{labels}}}"] = (256, 0)
            # 5 steps of up to 90 ms and 5 of up to 100 in 15 s
            for le, count in (("0.08", 0), ("0.09", 5), ("0.1", 10), ("+Inf", 10)):
                series[f'kvferry_step_seconds_bucket{{{labels},le="{le}"}}'] = (0, count)
        # Of the first, 56 % of the pages and half of the sequences; of the second, 16 % and half.
        taken = (DECODE_PAGES - 5000 - 1000 + 500) / DECODE_PAGES + 0.5
        expected = {
            "kvferry:prefill_workers_needed": 2 * 0.5 + 40_000 / (30 * PREFILL_RATE),
            "kvferry:decode_workers_needed": taken + 10_000 / (DECODE_PAGES * PAGE_TOKENS),
            "kvferry:decode_itl_share": histogram_quantile(0.95, [0.085] * 5 + [0.095] * 5) / 0.1,
        }
        self.check(promtool, rules, series, expected)

    def test_a_cluster_without_queue_or_measured_rate_has_numbers_too(self, promtool, rules):
        labels = '{namespace="n",pod="p",tier="prefill"}'
        series = {
            f"kvferry_step_seconds_sum{labels}": (0, 0),
            f"kvferry_prompt_tokens_per_second{labels}": (0, 0),
            f"kvferry_pages_total{labels}": (1000, 0),
        }
        labels = 'namespace="n",pod="d",tier="decode"'
        series[f"kvferry_pages_total{{{labels}}}"] = (1000, 0)
        series[f'kvferry_step_seconds_bucket{{{labels},le="+Inf"}}'] = (0, 0)
        self.check(promtool, rules, series, {"kvferry:prefill_workers_needed": 0, "kvferry:decode_itl_share": 0})

    def test_workers_that_have_not_measured_yet_do_not_make_others_look_slow(self, promtool, rules):
        series = {'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="prefill"}': (0, 300_000 * 15)}
        for pod, rate in (("p0", 33_000), ("p1", 0), ("p2", 0)):
            labels = f'{{namespace="n",pod="{pod}",tier="prefill"}}'
            series[f"kvferry_step_seconds_sum{labels}"] = (0, 0)
            series[f"kvferry_prompt_tokens_per_second{labels}"] = (rate, 0)
            series[f"kvferry_pages_total{labels}"] = (1000, 0)
        self.check(promtool, rules, series, {"kvferry:prefill_workers_needed": 300_000 / (30 * 33_000)})

    def test_one_tier_needs_workers_for_its_prompts_and_for_its_answers(self, promtool, rules):
        """Two colocated workers: one computes prompts for a quarter of its time, the other has not measured its rate
        yet. 40,000 tokens wait for compute, 10,000 for pages."""
        series = {
            'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="prefill"}': (0, 40_000 * 15),
            'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="decode"}': (0, 10_000 * 15),
            # The router's own count of the same tokens has no tier.
            'kvferry_prompt_tokens_total{namespace="n",pod="r"}': (0, 2000 * 15),
        }
        for pod, rate, tokens in (("c0", PREFILL_RATE, PREFILL_RATE / 4), ("c1", 0, 0)):
            labels = f'namespace="n",pod="{pod}",tier="colocated"'
            series[f"kvferry_prompt_tokens_total{{{labels}}}"] = (0, tokens * 15)
            series[f"kvferry_prompt_tokens_per_second{{{labels}}}"] = (rate, 0)
            # It is busy all the time, with answers too: that says nothing.
            series[f"kvferry_step_seconds_sum{{{labels}}}"] = (0, 15)
            series[f"kvferry_pages_total{{{labels}}}"] = (DECODE_PAGES, 0)
            series[f"kvferry_page_tokens{{{labels}}}"] = (PAGE_TOKENS, 0)
            series[f'kvferry_pages{{{labels},owner="free"}}'] = (5000, 0)
            series[f'kvferry_pages{{{labels},owner="cached"}}'] = (1000, 0)
            series[f"kvferry_expected_growth_pages{{{labels}}}"] = (500, 0)
            series[f'kvferry_sequences{{{labels},state="running"}}'] = (8, 0)
            series[f"kvferry_max_sequences{{{labels}}}"] = (256, 0)
            for le, count in (("0.08", 0), ("0.09", 5), ("0.1", 10), ("+Inf", 10)):
                series[f'kvferry_step_seconds_bucket{{{labels},le="{le}"}}'] = (0, count)
        taken = 2 * (DECODE_PAGES - 5000 - 1000 + 500) / DECODE_PAGES
        expected = {
            "kvferry:prefill_workers_needed": 0.25 + 40_000 / (30 * PREFILL_RATE),
            "kvferry:decode_workers_needed": taken + 10_000 / (DECODE_PAGES * PAGE_TOKENS),
            "kvferry:decode_itl_share": histogram_quantile(0.95, [0.085] * 5 + [0.095] * 5) / 0.1,
        }
        self.check(promtool, rules, series, expected)

    def test_one_tier_that_has_not_measured_yet_has_numbers_too(self, promtool, rules):
        labels = '{namespace="n",pod="c",tier="colocated"}'
        series = {
            f"kvferry_prompt_tokens_total{labels}": (0, 0),
            f"kvferry_prompt_tokens_per_second{labels}": (0, 0),
            f"kvferry_pages_total{labels}": (1000, 0),
            'kvferry_queued_token_seconds_total{namespace="n",pod="r",waits_for="prefill"}': (0, 60_000 * 15),
        }
        self.check(promtool, rules, series, {"kvferry:prefill_workers_needed": 60_000 / (30 * 1000)})
