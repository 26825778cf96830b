"""Layers for images: residual networks (`resnets`) and vision transformers (`vits`)."""
