"""The main job on a real model: `python -m bridge.demo`. The parts are plain functions; the notebook uses them too."""
