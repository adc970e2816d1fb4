"""The trainers on a GPU, where there is one."""

import pytest
import torch

from tests.course.helpers import randomize
from tests.course.test_trainers import Interrupting, make_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_run_on_the_gpu_stops_and_goes_on(kind, dtype, tmp_path):
    setup = {"device": None, "dtype": dtype}
    stopped = make_trainer(kind, tmp_path, reward_fn=Interrupting(3), **setup)
    assert {p.device.type for p in stopped.model.trainable_parameters()} == {"cuda"}
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(kind, tmp_path, reward_fn=Interrupting(None), **setup)
    resumed.load_checkpoint(tmp_path / kind / "checkpoint.pt")
    assert [row["phase"] for row in resumed.train()] == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_first_ratio_on_the_gpu_is_one(kind, dtype, tmp_path):
    trainer = make_trainer(kind, tmp_path, device=None, dtype=dtype)
    randomize(trainer.model)
    memory = trainer.rollout_phase()
    fields = [x for x in memory.get_fields().values() if x is not None]
    assert {x.device.type for x in fields} == {"cuda"}
    trainer.compute_rlhf_objective(memory.get_minibatches(trainer.generator)[0])
    assert trainer.metrics["approx_kl"][0] < 1e-6
