"""What a cluster refuses, in one line that names the key; what plain values make of it."""

import json
import math

import pytest

from lightning_qrl.simulator.cluster import (
    Cluster,
    Empirical,
    Lognormal,
    Samplers,
    Trainers,
    WeightSync,
)

NAN = math.nan


def test_plain_values_make_what_classes_make():
    plain = {
        "samplers": [{"slots": 8, "gpus": 1}, {"slots": 2, "tokens_per_second": 9.5, "gpus": 3}],
        "trainers": {"count": 2},
        "lengths": {"mean": 100, "spread": 0, "limit": 200},
        "weights": {"bits": 4, "blocks_trainer": False},
        "learning": {"decay": 0.2, "reward_start": -1.0, "mismatch_limit": math.inf},
        "batch": 4,
        "queue_depth": None,
    }
    made = Cluster.from_mapping(plain)
    pools = (Samplers(slots=8, gpus=1), Samplers(slots=2, tokens_per_second=9.5, gpus=3))
    assert made == Cluster(
        samplers=pools,
        trainers=Trainers(count=2),
        lengths=Lognormal(mean=100, spread=0, limit=200),
        weights=WeightSync(bits=4, blocks_trainer=False),
        learning=made.learning,
        batch=4,
        queue_depth=None,
    )
    assert (made.learning.decay, made.learning.reward_start, made.learning.gain) == (0.2, -1.0, 6.0)
    assert Cluster.from_mapping({"samplers": {"slots": 8, "gpus": 1}}).samplers == pools[:1]
    assert Cluster.from_mapping({}) == Cluster()


def test_a_mapping_there_and_back():
    for of in (
        Cluster(),
        Cluster(samplers=(Samplers(), Samplers(slots=3)), queue_depth=None),
        Cluster(lengths=Empirical(values=(3, 5)), in_flight_update=True, target_reward=0.5),
    ):
        assert Cluster.from_mapping(json.loads(json.dumps(of.to_mapping(), allow_nan=False))) == of


def test_lengths_from_a_list_and_from_a_file(tmp_path):
    assert Cluster.from_mapping({"lengths": {"values": [3, 5]}}).lengths == Empirical(values=(3, 5))
    (tmp_path / "json").write_text("[3, 5]")
    (tmp_path / "lines").write_text("3\n5\n")
    for name in ("json", "lines"):
        lengths = Cluster.from_mapping({"lengths": {"file": str(tmp_path / name)}}).lengths
        assert lengths == Empirical(values=(3, 5))


def test_the_time_of_a_sync():
    assert WeightSync(parameters=8e9, bits=4, bandwidth=2e9, latency=0.5).seconds == 2.5


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"samplers": {"slots": 0}}, "samplers.slots must be at least 1"),
        ({"samplers": []}, "samplers is empty"),
        ({"samplers": [{"slots": 1}, {"slots": 1.5}]}, "samplers.1.slots is a whole number"),
        ({"samplers": {"slot": 1}}, "samplers.slot is unknown; did you mean samplers.slots"),
        ({"samplers": 7}, "samplers is a mapping of keys and values, got 7"),
        ({"samplers": {"tokens_per_second": -1}}, "samplers.tokens_per_second must be at least"),
        ({"samplers": {"tokens_per_second": NAN}}, "tokens_per_second must be .* got nan"),
        ({"samplers": {"price": "2"}}, "samplers.price is a number, got '2'"),
        ({"trainers": {"overhead": -1}}, "trainers.overhead must be at least 0"),
        ({"trainers": {"tokens_per_second": math.inf, "overhead": 0}}, "trainers.overhead .* time"),
        ({"trainers": {"count": 33}, "batch": 4, "group_size": 8}, "trainers.count=33 .* the 32 "),
        ({"weights": {"bandwidth": 0}}, "weights.bandwidth must be at least 1"),
        ({"weights": {"blocks_trainer": 1}}, "weights.blocks_trainer is true or false, got 1"),
        ({"lengths": {"spread": -1}}, "lengths.spread must be at least 0"),
        ({"lengths": {"mean": 9, "spread": 0, "limit": 5}}, "lengths.mean=9 .* raise limit"),
        ({"lengths": {"values": []}}, "lengths.values is empty"),
        ({"lengths": {"values": [0]}}, "lengths.values are whole numbers from 1"),
        ({"lengths": {"values": [1], "mean": 3}}, "lengths.mean is unknown; known are values"),
        ({"lengths": {"file": "none", "mean": 3}}, "lengths.file stands alone"),
        ({"lengths": {"file": "no/such"}}, "no/such holds no token counts"),
        ({"learning": {"half": 0}}, "learning.half must be at least"),
        ({"learning": {"gain": NAN}}, "learning.gain must be"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": True}, "batch is a whole number, got true"),
        ({"batch": None}, "batch is a whole number, got null"),
        ({"when_full": None}, "when_full is wait or drop_oldest, got null"),
        ({"duration": "inf"}, "duration must be .* got inf"),
        ({"group_size": "inf"}, "group_size is a whole number, got inf"),
        ({"bacth": 3}, "bacth is unknown; did you mean batch"),
        ({"queue_depth": 0}, "queue_depth must be at least 1"),
        ({"when_full": "panic"}, "when_full is wait or drop_oldest"),
        ({"when_full": "drop_oldest", "queue_depth": None}, "when_full=drop_oldest does nothing"),
        ({"in_flight_update": "yes"}, "in_flight_update is true or false"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"max_staleness": 2, "updates": 3}, "max_staleness=2 is less than the 3 updates"),
        ({"max_staleness": 2, "weight_sync_every": 4}, "weights that are up to 3 behind"),
        ({"samplers": {"prefill_tokens_per_second": 9}}, "does nothing without in_flight_update"),
        ({"samplers": {"tokens_per_second": math.inf}, "queue_depth": None}, "without end"),
        ({"duration": None}, "steps or duration must be set"),
        ({"duration": 0}, "duration must be at least"),
        ({"duration": NAN}, "duration must be"),
        ({"floor": -0.1}, "floor must be at least 0"),
        ({"target_reward": NAN}, "target_reward must be"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_is_refused(values, says):
    with pytest.raises(ValueError, match=says) as refused:
        Cluster.from_mapping(values)
    assert "\n" not in str(refused.value)
