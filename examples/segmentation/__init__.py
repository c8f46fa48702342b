"""The parts of ``train_segmentation.py``, one a file."""
