"""Makes torchft.json: what torchft's DiLoCo makes of two layers, by the fixtures of its own
regression tests. `test_local_sgd` compares it with gradwire. And torchft_failure.json: the same
where a replica fails, with which `test_elastic` compares.

    git clone https://github.com/meta-pytorch/torchft && git -C torchft checkout 7eb7087
    python tests/core/authors/torchft.py torchft > tests/core/authors/torchft.json
    python tests/core/authors/torchft.py torchft failure > tests/core/authors/torchft_failure.json

The numbers are those of
test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_{0..5}.json
(BSD 3-Clause License, Copyright Meta Platforms, Inc. and affiliates), of the first replica: both
have the same; and of …mocked_failure_recovery_0.json, of both. None of torchft's code is here.

Every inner step subtracts 2. The outer optimizer is SGD with rate 2. Two fragments, `layers.0` and
`layers.1`, take turns every third step; a difference leaves `delay` steps before. The second
replica fails after six steps, and begins anew while the first one waits.
"""

import json
import sys
from pathlib import Path

CASES = [(0, 0.0), (0, 0.5), (0, 1.0), (1, 0.0), (1, 0.5), (1, 1.0)]
FAILURE = "torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_failure_recovery_0.json"
NAME = "torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_{}.json"


def steps(history):
    """By step, the layers' only elements."""
    return {
        step: [at[f"layers.{i}.weight"][0][0] for i in range(2)] for step, at in history.items()
    }


def of(replica):
    """What is kept of a replica's history."""
    return {
        "parameters": steps(replica["history"]),
        "outer": steps(replica["global_parameter_history"]),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / "test_fixtures"
    if "failure" in sys.argv:
        print(
            json.dumps([of(replica) for (replica,) in json.loads((folder / FAILURE).read_text())])
        )
        raise SystemExit
    cases = []
    for number, (delay, alpha) in enumerate(CASES):
        replica = json.loads((folder / NAME.format(number)).read_text())[0][0]
        cases.append({"delay": delay, "alpha": alpha, **of(replica)})
    print("[" + ",\n ".join(map(json.dumps, cases)) + "]")
