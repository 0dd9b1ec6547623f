"""The Hydra configuration of the recipes. This file makes it a package, ``lightning_dp.conf``, in the wheel."""
