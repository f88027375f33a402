"""The last words of a run."""

from functools import partial

from lightning_qrl.reports import summary as reports
from lightning_qrl.tracking import MLflowRun

summary = partial(reports.summary, evaluates=True)


def made(tmp_path, uri="sqlite:///mlflow.db"):
    run = MLflowRun(run_name="4bitter-seed0", uri=uri, folder=str(tmp_path))
    run.run_id = "0123456789abcdef"
    return run


def test_it_says_what_came_of_a_run_and_where_it_is(tmp_path):
    run = made(tmp_path)
    text = summary("FINISHED", "nvfp4 on 46", {0: {"reward": 0.34}, 80: {"reward": 0.9}}, run)
    assert text.splitlines() == [
        "",
        "finished: nvfp4 on 46",
        "held-out reward  0.340 at step 0  ->  0.900 at step 80",
        "run     4bitter-seed0 (id 0123456789abcdef)",
        f"folder  {run.run_folder}",
        "look    mlflow ui --backend-store-uri sqlite:///mlflow.db",
    ]


def test_one_evaluation_is_not_shown_as_a_change(tmp_path):
    text = summary("KILLED", "p", {0: {"reward": 0.34}}, made(tmp_path))
    assert "held-out reward  0.340 at step 0\n" in text
    assert "->" not in text
    assert "--resume" not in text  # there is no checkpoint


def test_without_evaluation_it_says_so(tmp_path):
    text = summary("FINISHED", "p", {}, made(tmp_path), evaluates=False)
    assert "not measured (no held_out_evaluation)\n" in text


def test_stopped_before_the_first_evaluation_it_blames_no_recipe(tmp_path):
    assert "held-out reward  not measured\n" in summary("KILLED", "p", {}, made(tmp_path))


def test_a_killed_run_says_how_to_go_on(tmp_path):
    run = made(tmp_path)
    (run.run_folder / "checkpoints").mkdir(parents=True)
    (run.run_folder / "checkpoints" / "step=2.ckpt").touch()
    assert summary("KILLED", "p", {}, run).endswith("qrl fit --resume 0123456789abcdef")


def test_a_server_is_looked_at_where_it_is(tmp_path):
    text = summary("FINISHED", "p", {}, made(tmp_path, "http://host:5000"))
    assert text.endswith("look    http://host:5000")


def test_a_run_that_never_began_is_nowhere_to_be_looked_at(tmp_path):
    for uri in ("sqlite:///mlflow.db", "http://host:5000"):
        run = made(tmp_path, uri)
        run.run_id = ""
        text = summary("KILLED", "p", {}, run)
        assert text.splitlines() == ["", "killed: p", "held-out reward  not measured"]
