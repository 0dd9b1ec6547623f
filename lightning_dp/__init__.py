"""Data-parallel training of convolutional networks with PyTorch Lightning."""
