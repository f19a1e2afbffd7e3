"""Penstock: pipeline-parallel training that wastes neither time nor memory."""
