"""What child processes run; they import this module by its name."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hardconcrete as hc
from tests.gating.networks import Net
from tests.processes import join_group, leave_group

LAM, DECAY = 0.01, 0.1


def make_gated() -> hc.GatedModel:
    """The same gated network in every process."""
    torch.manual_seed(0)
    return hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), sites=Net.sites)


def examples(seed: int) -> torch.Tensor:
    """A batch of its own for each process."""
    return torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def train_step(_: int, gated: hc.GatedModel, answer: Path) -> None:
    """One step on the model that arrived; the answer is the state after it."""
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(hc.parameter_groups(gated, lr=0.5))
    torch.manual_seed(7)
    (gated(examples(0)).square().mean() + hc.L0Penalty(gated, LAM)()).backward()
    optimizer.step()
    torch.save(gated.state_dict(), answer)


def loss_of_rank(gated: torch.nn.Module, penalty: hc.L0Penalty, rank: int) -> torch.Tensor:
    """Its own gates and examples, and the penalty all ranks share."""
    torch.manual_seed(rank)
    return gated(examples(rank)).square().mean() + penalty()


def distributed_gradients(rank: int, folder: Path) -> None:
    """Two steps of data parallel training on one of two processes; answers with the gradients."""
    join_group(rank, folder)
    gated = make_gated()
    penalty = hc.L0Penalty(gated, LAM, weight_decay=DECAY)
    parallel = DistributedDataParallel(gated)
    found = []
    for _ in range(2):  # a parameter without a gradient in the first would fail the second
        parallel.zero_grad()
        loss_of_rank(parallel, penalty, rank).backward()
        found.append({name: p.grad.clone() for name, p in gated.named_parameters()})
    leave_group(found, rank, folder)


def found_gates() -> hc.GatedModel:
    """Gates on units that were found; one of them is several columns of the next layer."""
    torch.manual_seed(0)
    return hc.attach_gates(Net(), torch.zeros(2, 1, 4, 4), droprate=0.5)


def found_step(_: int, gated: hc.GatedModel, answer: Path) -> None:
    """As ``train_step``, in a process that never traced the model."""
    train_step(0, gated, answer)


def fully_sharded_step(rank: int, folder: Path) -> None:
    """Two steps with sharded weights and two without; the gates are whole in every process."""
    join_group(rank, folder, world_size=1)
    answers = []
    for sharded in (True, False):
        gated = make_gated()
        penalty = hc.L0Penalty(gated, LAM)
        if sharded:
            settings = {"mesh": init_device_mesh("cpu", (1,))}
            settings["ignored_params"] = set(gated.gates.parameters())
            fully_shard(gated.model.fc1, **settings)
            fully_shard(gated, **settings)
        optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
        outputs = [gated.eval()(examples(0))]
        gated.train()
        for _ in range(2):
            optimizer.zero_grad()
            loss_of_rank(gated, penalty, rank).backward()
            optimizer.step()
        outputs.append(gated.eval()(examples(0)))
        state = get_model_state_dict(gated, options=StateDictOptions(full_state_dict=True))
        answers.append({**state, "outputs": torch.stack(outputs).detach()})
    leave_group(answers, rank, folder, world_size=1)
