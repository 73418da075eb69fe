"""Heads that draft for a model, as folders have them: in one of their own, or behind the model.

eagle3_folder   an EAGLE-3 head's folder
mtp_folder      the layer behind a model's last one, in the model's own folder
"""
