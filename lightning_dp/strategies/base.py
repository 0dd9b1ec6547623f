"""What the strategies have in common: DDPStrategy, and what it does not refuse."""

from __future__ import annotations

from typing_extensions import override

from lightning_dp._lightning import DDPStrategy, OwnTrainerOnly


class BaseStrategy(OwnTrainerOnly, DDPStrategy):
    """Refuses a job with another number of ranks than the Trainer knows of: groups and samplers are made for those.

    Lightning's own environment takes the number of ranks from the Trainer. Others, like Ray's, take it from the job and
    say nothing where the Trainer's is another one.

    Raises:
        ValueError: in the Trainer's constructor.
    """

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        assert self.cluster_environment is not None
        known, actual = self.num_nodes * self.num_processes, self.cluster_environment.world_size()
        if actual != known:
            raise ValueError(
                f"num_nodes={self.num_nodes} with {self.num_processes} devices each make {known} ranks, but the job "
                f"has {actual}. Give num_nodes= and devices= as the job was started (as many ranks on each node), or "
                "start that many ranks (SLURM: srun --ntasks-per-node); in an interactive SLURM job, "
                "plugins=[LightningEnvironment()]"
            )
